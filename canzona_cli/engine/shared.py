"""A micro-group some of whose matrices are shared: every rank updates its own fragment, a host iterates on squares.

What travels of a shared matrix, beside what travels of hosted ones (`hosted`), in each of its rounds:

    to the host      every other rank's contribution: a square of the short side, and some numbers
    from the host    the answer to every other rank: the same

Stage by stage: contributions (0), answers (1), contributions (2), answers (3), new fragments (4); hosted matrices of
the group are done in the first three. `optimizers/shared.py` says what contributions and answers are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from canzona_cli.engine.buffers import AllToAll
from canzona_cli.engine.hosted import Copy, HostedGroup, Wiring, Write
from canzona_cli.model.matrix import Matrix
from canzona_cli.optimizers.shared import ANSWERED, CONTRIBUTED, Message, SharedForm, Together, Turns
from canzona_cli.planner.exchange import Parcel


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Scratch of a rank's shared matrices, each tensor flat; groups take turns at several of a kind."""

    iterates: tuple[torch.Tensor, ...]
    """Of the products' type: fragments of a group, from its first stage to its last."""
    squares: tuple[tuple[torch.Tensor, ...], ...]
    """By round: this rank's contributions to matrices hosted here, of the type of those that travel."""
    gradient: torch.Tensor
    """fp32: one fragment's, where it does not lie in one piece."""

    @property
    def bytes(self) -> int:
        kept = (*self.iterates, *(square for of_round in self.squares for square in of_round), self.gradient)
        return sum(tensor.nbytes for tensor in kept)


class SharedMatrix:
    """A shared matrix on one rank of its owner's row.

    Args:
        x: scratch of its own, flat, as long as the fragment; None where it has no rounds.
        gradient: fp32, flat, at least as long as the fragment; several take turns at it.
    """

    def __init__(
        self, wiring: Wiring, matrix: Matrix, optimizer: SharedForm, x: torch.Tensor | None, gradient: torch.Tensor
    ) -> None:
        self.matrix, self.master, self._optimizer = matrix, wiring.masters[matrix.index], optimizer
        self._x = x.view(self.master.shape) if x is not None else None
        self.weight = wiring.fragments.weight(matrix)
        reduced = wiring.fragments.gradient(matrix)
        self._in_place = lies_flat(reduced)
        if self._in_place:
            self._gradient, self._gathered = reduced.view(self.master.shape), None
        else:
            self._gradient = gradient[: matrix.held_elements(wiring.fragments.tp)].view(self.master.shape)
            self._gathered = Copy(self._gradient.view(reduced.shape), reduced)
        self.contributions: list[Message] = []
        """Own ones, by round."""
        self.answers: list[Message] = []
        self.left = False
        """Whether its last update is still to be made `alone`; the same on all ranks."""

    @property
    def excluded(self) -> bool:
        """Whether it is updated `alone` in this step; the same on all ranks. What travels of it then means nothing."""
        return self._optimizer.excluded(self.master)

    def contribute(self, number: int, scale: float) -> None:
        """This rank's part of round `number`; `scale` multiplies the gradient, which the first one takes."""
        assert self._x is not None
        if number == 0:
            self._take_scaled(scale)
        if not self.excluded:
            self._optimizer.contribute(
                self.master,
                self._x,
                self.contributions[number],
                whole=self.matrix.shape,
                answer=self.answers[number - 1] if number else None,
            )
        self.master.grad = None

    def finish(self) -> None:
        """Update the fragment, or say that the matrix is `left`."""
        assert self._x is not None
        answer = self.answers[-1]
        self.left = self.excluded or not self._optimizer.finish(
            self.master, self._x, whole=self.matrix.shape, answer=answer
        )

    def together(self, scale: float, ranks: Together) -> Turns[None]:
        """The whole update, where squares are cut by rows; or the matrix is `left`. Collective."""
        self._take_scaled(scale)
        whole = self.matrix.shape
        self.left = self.excluded or not (yield from self._optimizer.together(self.master, whole=whole, ranks=ranks))
        self.master.grad = None

    def alone(self, scale: float, group: torch.distributed.ProcessGroup | None) -> None:
        """Update it in the same step without the iteration that went wrong. Collective."""
        self._take_gradient(scale)
        self._optimizer.alone(
            self.master,
            whole=self.matrix.shape,
            total=lambda part: torch.distributed.all_reduce(part, group=group),
        )
        self.master.grad = None

    def write(self) -> Write:
        """The new fragment of the weight."""
        same = self.weight.dtype is self.master.dtype
        return Write(
            target=self.weight,
            source=self.master.detach().view(self.weight.shape),
            rounded=self.weight if same else torch.empty_like(self.weight),
        )

    def publish(self) -> None:
        """Round the master into the weight."""
        self.weight.copy_(self.master.detach().view(self.weight.shape))

    @torch.no_grad()
    def reload(self) -> None:
        """Take the weight as master."""
        self.master.detach().view(self.weight.shape).copy_(self.weight)

    def _take_scaled(self, scale: float) -> None:
        self._take_gradient(scale)
        if self._in_place and scale != 1.0:
            self._gradient.mul_(scale)

    def _take_gradient(self, scale: float) -> None:
        """To where the optimizer reads it; what lies in place was scaled the first time."""
        if self._gathered is not None:
            self._gathered.run(scale)
        self.master.grad = self._gradient


class SharedGroup(HostedGroup):
    """A micro-group with shared matrices. `run` its stages in the pipeline's order.

    Args:
        hosted, scratch, finite: as of a `HostedGroup`.
        rounds: both exchanges of each round; the first also carry what is hosted.
        shared: of the group, in the plan's order, each with the TP rank that hosts it.
        optimizer: of all fragments of this rank.
        memory: the group takes the sets at `number`, its own, in turn.
    """

    def __init__(
        self,
        wiring: Wiring,
        hosted: tuple[Matrix, ...],
        rounds: Sequence[tuple[AllToAll, AllToAll]],
        scratch: torch.Tensor,
        finite: torch.Tensor,
        *,
        shared: Sequence[tuple[Matrix, int]],
        optimizer: SharedForm,
        memory: SharedMemory,
        number: int,
    ) -> None:
        super().__init__(wiring, hosted, *rounds[0], scratch, finite)
        self._rounds, self._optimizer = rounds, optimizer
        sizes = [matrix.held_elements(wiring.fragments.tp) for matrix, _ in shared]
        room = memory.iterates[number % len(memory.iterates)][: sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]
        self.shared = [
            SharedMatrix(wiring, matrix, optimizer, x, memory.gradient)
            for (matrix, _), x in zip(shared, room, strict=True)
        ]
        known = {one.matrix.index: one for one in self.shared}
        here = [matrix for matrix, host in shared if host == wiring.rank]
        self._bound = [
            _Round(wiring, here, known, *exchanges, squares[number % len(squares)], optimizer.dtype)
            for exchanges, squares in zip(rounds, memory.squares, strict=True)
        ]
        self._grad_pack += self._bound[0].told
        self._weight_pack += self._bound[0].answered

    def run(self, stage: int, scale: float) -> None:
        number, answering = divmod(stage, 2)
        if answering:
            self._answer(number, scale)
            return
        if number:
            self._receive_answers(number - 1)
        if number < len(self._rounds):
            self._contribute(number, scale)
        else:
            self._update()

    def _contribute(self, number: int, scale: float) -> None:
        out, _ = self._rounds[number]
        with self._wiring.timer.phase("matrix_update"):
            out.wait_for_memory()
            for one in self.shared:
                one.contribute(number, scale)
        if number == 0:
            self.send_gradients()
        else:
            self._send(self._bound[number].told, out)

    def _answer(self, number: int, scale: float) -> None:
        """What the ranks contributed to matrices hosted here is summed up, and answered."""
        bound, (out, back) = self._bound[number], self._rounds[number]
        if bound.asked:
            self._receive(out, bound.hear)
        if number == 0:
            self.receive_gradients(scale)
            self.step()
        if bound.asked:
            with self._wiring.timer.phase("matrix_update"):
                back.wait_for_memory()
                for one, contributions, answer in bound.asked:
                    if not one.excluded:
                        self._optimizer.answer(one.matrix.index, contributions, answer, number=number)
        if number == 0:
            self.send_weights()
            return
        with self._wiring.aside.work():  # where it is not waited for yet
            self._finish(out)
        self._send(bound.answered, back)

    def _receive_answers(self, number: int) -> None:
        # Own answers are read where they are sent from.
        self._receive(self._rounds[number][1], self._bound[number].learn)
        if number == 0:
            self.receive_weights()

    def _receive(self, exchange: AllToAll, numbers: Sequence[Copy]) -> None:
        with self._wiring.timer.phase(self._moving):
            self._finish(exchange)
            for copy in numbers:
                copy.run()

    def _update(self) -> None:
        with self._wiring.timer.phase("matrix_update"):
            for one in self.shared:
                one.finish()
        # A trusted step is finite, and of known length: what it is added to stays finite.
        with self._wiring.timer.phase(self._moving), self._wiring.aside.work():
            for one in self.shared:
                if not one.left:
                    one.publish()

    def _send(self, packs: Sequence[Copy], exchange: AllToAll) -> None:
        with self._wiring.timer.phase(self._moving), self._wiring.aside.work():
            for copy in packs:
                copy.run()
            self._start(exchange)


class _Round:
    """Where one round's messages lie. Numbers travel as their bits, each in elements of the message's type, and so do
    squares: nothing rounds what travels."""

    def __init__(
        self,
        wiring: Wiring,
        here: Sequence[Matrix],
        shared: dict[int, SharedMatrix],
        out: AllToAll,
        back: AllToAll,
        squares: torch.Tensor,
        products: torch.dtype,
    ) -> None:
        answering = as_wide(products, back.send.dtype)
        self.told: list[Copy] = []
        """Numbers of contributions into messages."""
        self.hear: list[Copy] = []
        """And out of them."""
        self.asked: list[tuple[SharedMatrix, list[Message], Message]] = []
        """Of each matrix hosted here: all ranks' contributions, in their order, and where the answer goes."""
        self.answered: list[Copy] = []
        """Answers into messages."""
        self.learn: list[Copy] = []
        """Numbers of answers out of them."""

        def message(square: torch.Tensor, count: int) -> Message:
            return Message(square=square, numbers=torch.zeros(count, dtype=torch.float32, device=wiring.device))

        offset = 0
        for matrix in here:
            side = min(matrix.shape)
            own = squares[offset : offset + side * side].view(side, side)
            offset += side * side
            shared[matrix.index].contributions.append(message(own, CONTRIBUTED))
        for parcel, square, bits in _parts(out.send, out.route.square_sends, CONTRIBUTED, squares.dtype):
            contribution = message(square, CONTRIBUTED)
            shared[parcel.matrix.index].contributions.append(contribution)
            self.told.append(Copy(bits, contribution.numbers.view(bits.dtype)))
        theirs: dict[tuple[int, int], Message] = {}
        for parcel, square, bits in _parts(out.receive, out.route.square_receives, CONTRIBUTED, squares.dtype):
            heard = theirs[parcel.matrix.index, parcel.peer] = message(square, CONTRIBUTED)
            self.hear.append(Copy(heard.numbers.view(bits.dtype), bits))
        answers: dict[int, Message] = {}
        for parcel, square, bits in _parts(back.send, back.route.square_sends, ANSWERED, answering):
            # Made where it lies for the first of its peers.
            answer = answers.setdefault(parcel.matrix.index, message(square, ANSWERED))
            if answer.square is not square:
                self.answered.append(Copy(square, answer.square))
            self.answered.append(Copy(bits, answer.numbers.view(bits.dtype)))
        for matrix in here:
            theirs[matrix.index, wiring.rank] = shared[matrix.index].contributions[-1]
            everyone = [theirs[matrix.index, rank] for rank in range(wiring.fragments.tp)]
            self.asked.append((shared[matrix.index], everyone, answers[matrix.index]))
        for parcel, square, bits in _parts(back.receive, back.route.square_receives, ANSWERED, answering):
            answers[parcel.matrix.index] = learnt = message(square, ANSWERED)
            self.learn.append(Copy(learnt.numbers.view(bits.dtype), bits))
        for index, one in shared.items():
            one.answers.append(answers[index])


def _parts(
    buffer: torch.Tensor, parcels: Sequence[Parcel], numbers: int, dtype: torch.dtype
) -> Iterator[tuple[Parcel, torch.Tensor, torch.Tensor]]:
    """Each parcel's square, (m, m) of `dtype` whatever the message's, and the bits of its numbers."""
    for parcel in parcels:
        side = min(parcel.matrix.shape)
        whole = buffer[parcel.offset : parcel.offset + parcel.elements]
        bits = whole[whole.numel() - numbers * torch.float32.itemsize // whole.itemsize :]
        yield parcel, whole.view(dtype)[: side * side].view(side, side), bits


def as_wide(products: torch.dtype, message: torch.dtype) -> torch.dtype:
    """Of squares in messages: that of the products, where their bits are as many."""
    return products if products.itemsize == message.itemsize else message


def lies_flat(gradient: torch.Tensor) -> bool:
    """Whether an optimizer can take a fragment's reduced gradient as it lies."""
    return gradient.dtype is torch.float32 and gradient.is_contiguous()
