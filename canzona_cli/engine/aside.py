"""A stream beside the one that computes, for packing and unpacking messages."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Aside:
    """What is enqueued within `work` overlaps what computes from then on; on a device without streams it is just done.

    Nothing needs `record_stream`: what is touched within `work` was allocated at set-up and stays; and a tensor that
    is made within it is used and freed within it.
    """

    def __init__(self, device: torch.device) -> None:
        # Urgent: a few short copies beside products that occupy the whole device, and somebody waits for the messages.
        self._stream = torch.cuda.Stream(priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def work(self) -> Iterator[None]:
        """Enqueue aside, behind all that the computing stream has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What computes goes on behind all that was enqueued aside."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
