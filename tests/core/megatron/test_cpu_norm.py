"""RMSNorm of a processor against torch's own in fp64."""

import pytest
import torch

from canzona_cli.core.megatron.model import ProcessorNorm, use_processor_norms

EPS = 1e-6
# Of the largest element: roundings of the type.
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("shape", [(7, 3, 64), (7, 3, 4, 32)], ids=["hidden", "heads"])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_values_and_gradients_are_torchs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    hidden[0] *= 1e-3  # where eps counts
    norm = torch.nn.RMSNorm(shape[-1], eps=EPS, dtype=dtype)
    torch.nn.init.normal_(norm.weight, mean=1, std=0.3, generator=generator)
    found = _passed(ProcessorNorm(norm), hidden, grad)
    wanted = _passed(norm.double(), hidden.double(), grad.double())
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype is dtype
        assert (ours.double() - theirs).abs().max() <= CLOSE[dtype] * theirs.abs().max()


def _passed(norm: torch.nn.Module, hidden: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Computes the output, and gradients of input and weight."""
    hidden = hidden.clone().requires_grad_()
    output = norm(hidden)
    return output.detach(), *torch.autograd.grad(output, (hidden, *norm.parameters()), grad)


def test_every_norm_of_a_model_is_replaced_and_keeps_its_weight() -> None:
    model = torch.nn.Sequential(torch.nn.RMSNorm(4, eps=EPS), torch.nn.Sequential(torch.nn.RMSNorm(4, eps=EPS)))
    before = dict(model.named_parameters())
    use_processor_norms(model)
    assert not any(isinstance(module, torch.nn.RMSNorm) for module in model.modules())
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
