"""What can go wrong for a user, each with a message that says what to do about it.

Everything here derives from `OutriderError`; the command line prints the message and exits with
`exit_status`, without a traceback. Anything else that escapes is a bug of ours.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of every error a user can cause or mend. The message says what to do."""

    exit_status = 2


class BadInput(OutriderError, ValueError):
    """A prompt, parameter or option that cannot be honoured."""


class UnsupportedModel(OutriderError):
    """A model that the general path cannot run exactly; the message names the reason."""


class ModelNotFound(OutriderError):
    """No such model: not a directory, GGUF file, embedded name or reachable hub id."""


class BadWeights(OutriderError):
    """A weights file that is truncated, corrupt or of the wrong kind."""


class OutOfMemory(OutriderError):
    """The KV pool, the device or the disk has no room; the message names the knob."""


class DrafterMismatch(OutriderError):
    """A drafter that does not fit its target (vocabulary, shape); names both."""


class OutriderWarning(UserWarning):
    """Something went on without what was asked for (say, a drafter that failed); the text is unharmed."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or on the host."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
