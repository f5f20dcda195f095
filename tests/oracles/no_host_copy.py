"""Modes in which nothing may go from a GPU to the host, or the other way with a wait."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HostCopyError(AssertionError):
    pass


class NoHostCopy(TorchDispatchMode):
    """Raises where an operation takes a tensor on a GPU and returns one on the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "cuda" in devices((args, kwargs)) and "cpu" in devices(result):
            raise HostCopyError(f"{function} copies to the host")
        return result


class WaitingUploadError(AssertionError):
    pass


class NoWaitingUpload(TorchDispatchMode):
    """Raises where an operation takes tensors on the host alone and returns one on a GPU, unless it is asked not to
    wait: torch waits for the whole stream then."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, kwargs = function(*args, **(kwargs or {})), kwargs or {}
        if devices((args, kwargs)) == {"cpu"} and "cuda" in devices(result) and not kwargs.get("non_blocking"):
            raise WaitingUploadError(f"{function} waits")
        return result


def devices(tree) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
