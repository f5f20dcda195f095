"""A mode in which nothing may go from a GPU to the host."""

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


def devices(tree) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
