"""The experts of a layer without Transformer Engine, and a meter that counts the tokens that each expert
gets.

Megatron's own module without Transformer Engine, `SequentialMLP`, names and orders its weights differently
from Transformer Engine's grouped layers. `GroupedExperts` has the names and the order of these layers (all
experts' fc1, then all experts' fc2), so that models, plans and checkpoints are the same on CPUs and GPUs, and
each kind of weight is one block of the gradient buffer.
"""

from collections.abc import Iterable

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from canzona_cli.core.setup import ModelConfig


class GroupedExperts(torch.nn.Module):
    """The experts of one layer that this rank holds: feed-forward networks, each of which is applied to some of the
    tokens."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        super().__init__()
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self._gated, self._activation = config.gated_linear_unit, config.activation_func
        outputs = 2 * width if self._gated else width
        self.linear_fc1 = GroupedLinear(num_local_experts, config.hidden_size, outputs, config, cut=0)
        self.linear_fc2 = GroupedLinear(num_local_experts, width, config.hidden_size, config, cut=1)

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Applies each token's expert to the token, and weights the result with the router's probability.

        Args:
            tokens: `[tokens, hidden]`, sorted by expert.
            tokens_per_expert: `[experts]`.
            probs: `[tokens]`, the factors of the inner activations, as in Megatron.

        Returns:
            The results `[tokens, hidden]`, and None in place of a bias.
        """
        counts: list[int] = tokens_per_expert.tolist()
        inner = self.linear_fc1(tokens, counts)
        if self._gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = self._activation(gate) * up
        else:
            inner = self._activation(inner)
        weighted = (inner * probs.unsqueeze(-1)).to(tokens.dtype)
        return self.linear_fc2(weighted, counts), None


class GroupedLinear(torch.nn.Module):
    """Linear layers without bias, one for each expert. The weights have the names that Transformer Engine's
    `GroupedLinear` uses: `weight0`, `weight1` and so on.

    Args:
        experts: the number of experts on this rank.
        inputs, outputs: the numbers of input and output features of this rank's fragment of a layer.
        cut: the dimension of the weights that tensor parallelism cuts.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, config: TransformerConfig, *, cut: int) -> None:
        super().__init__()
        # Megatron separates the gradients of experts if copies of experts and of dense weights are on
        # different ranks.
        separate = (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for expert in range(experts):
            weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(tensor=weight, is_parallel=True, dim=cut, stride=1)
            weight.allreduce = not separate  # type: ignore[attr-defined]
            self.register_parameter(f"weight{expert}", weight)

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Multiplies each expert's tokens by the expert's weight. The weight of an expert without tokens gets
        a gradient of zeros.

        Args:
            tokens: `[tokens, inputs]`, sorted by expert.
            counts: The number of tokens of each expert.

        Returns:
            `[tokens, outputs]`.
        """
        parts = zip(torch.split(tokens, counts), self.parameters(), strict=True)
        return torch.cat([torch.nn.functional.linear(part, weight) for part, weight in parts])


class RoutingMeter:
    """A meter that counts, in each step, the tokens that each expert of this rank's layers gets, and adds up
    the balancing losses."""

    def __init__(self, chunks: Iterable[torch.nn.Module], model: ModelConfig, device: torch.device) -> None:
        self._tokens = torch.zeros(model.num_layers, model.num_experts, device=device)
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._count)

    def _count(self, router: TopKRouter, inputs: object, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        # With full recomputation, there are two forward passes, the first without gradients.
        if router.training and torch.is_grad_enabled():
            self._tokens[router.layer_number - 1] += outputs[1].sum(0)

    def take(self) -> torch.Tensor:
        """Returns this rank's part of the step's counts and losses, and resets them to zero.

        Returns:
            `[layers, 1 + experts]`: each layer's balancing losses, added up over micro-batches, and its token
            counts. The sums over all ranks are the values of the model.
        """
        tracker = get_moe_metrics_tracker()
        losses = torch.zeros_like(self._tokens[:, :1])
        for entry in tracker.metrics.values():
            losses += entry.values.unsqueeze(1)
        losses_and_counts = torch.cat([losses, self._tokens], dim=1)
        self._tokens.zero_()
        tracker.clear()
        return losses_and_counts


def leave_to_adamw(model: torch.nn.Module) -> None:
    """Marks the weights of routers and of learned positions so that Megatron's own optimizers leave them to AdamW, as
    canzona's do."""
    for module in model.modules():
        if isinstance(module, TopKRouter | torch.nn.Embedding):
            module.weight.is_embedding_or_output_parameter = True  # type: ignore[union-attr]
