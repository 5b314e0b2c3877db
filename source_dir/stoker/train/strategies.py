"""Train worker: strategies to distribute a model over train workers.

ddp keeps the whole model in each train worker and averages the gradients. fsdp (PyTorch's fully_shard)
shards parameters, gradients and optimiser state, and gathers a block's parameters while that block
computes. Both use Ray Train's process group.
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_with_path

from stoker.errors import UsageError
from stoker.recipe import SOURCE_FOLDER, Batch, load_object
from stoker.train.device import on_tensors

BLOCK_PARAMETERS = 10_000
"""Repeated modules with fewer parameters are not gathered separately: each gather is a collective call."""
LARGE_PARAMETERS = 1_000_000
"""From this size on, a linear layer, convolution or embedding outside such modules is."""

FRESH = "fresh"
"""Key for the options of an optimiser's groups, if there is no state yet."""


def prepare_model(model: Any, device: Any, strategy: str = "ddp") -> Any:
    """Distribute the model if there are several ranks; all start from rank 0's weights and buffers."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not several_ranks():
        return model.to(device)
    known = {"ddp": replicate, "fsdp": shard}
    apply = known.get(strategy) or load_object(strategy, SOURCE_FOLDER, "train.strategy")
    spread = apply(model, device)
    if not (is_ddp(spread) or is_sharded(spread)):
        raise UsageError(
            f"train.strategy: {strategy} returned a {type(spread).__name__}, not a DistributedDataParallel or"
            " a model under fully_shard, so its gradients would not be averaged"
        )
    if is_ddp(spread):
        share_buffers(spread)
    return spread


def several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def from_rank(value: Any, rank: int = 0) -> Any:
    """Broadcast a rank's value. Collective."""
    box = [value]
    if several_ranks():
        dist.broadcast_object_list(box, src=rank)
    return box[0]


def replicate(model: Any, device: Any) -> Any:
    devices = [device] if device.type == "cuda" else None
    # Buffers are synchronised before they are used or saved (share_buffers), not before each forward.
    options: dict[str, Any] = {"broadcast_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        options = {"forward_sync_buffers": False}
    return DistributedDataParallel(model.to(device), device_ids=devices, **options)


def shard(model: Any, device: Any) -> Any:
    """In place; only one block at a time is moved to the device whole, so the model may exceed its memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    weights = dict(model.state_dict())
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    load_full_state(model, None, weights, None)
    return model


def blocks(model: Any) -> list[Any]:
    """The modules whose parameters are gathered together, inner ones first.

    These are modules that a container repeats (transformer blocks, residual blocks, stages of them) and
    large single layers outside. timm's models need no list of their own for this.
    """
    found: list[Any] = []
    counts = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    shared = {number for number, count in counts.items() if count > 1}

    def visit(module: Any, repeated: bool, inside: bool) -> int:
        """Return the number of parameters of `module` that no block has claimed."""
        kinds = [type(child) for child in module.children()]
        container = isinstance(module, nn.Sequential | nn.ModuleList)
        free = sum(int(p.numel()) for p in module.parameters(recurse=False))
        for child in module.children():
            again = (
                container and kinds.count(type(child)) > 1 and any(True for _ in child.children())
            )
            free += visit(child, again, inside or again)
        # Exact types only: a parent may read a subclass without calling it.
        single = not inside and type(module) in (nn.Linear, nn.Conv2d, nn.Embedding)
        enough = free >= BLOCK_PARAMETERS if repeated else single and free >= LARGE_PARAMETERS
        if enough and shared.isdisjoint(id(p) for p in module.parameters()):
            found.append(module)
            return 0
        return free

    visit(model, False, False)
    return [module for module in found if module is not model]


def plain(model: Any) -> Any:
    return model.module if is_ddp(model) else model


def is_ddp(model: Any) -> bool:
    return isinstance(model, DistributedDataParallel)


def average_gradients(parameters: list[Any]) -> None:
    """Average gradients that were accumulated without DDP's backward."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    pending = [dist.all_reduce(p.grad, async_op=True) for p in parameters]
    for work in pending:
        work.wait()
    torch._foreach_div_([p.grad for p in parameters], dist.get_world_size())


def is_sharded(model: Any) -> bool:
    """Whether every forward is a collective call."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def full_state(model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(weights, optimiser state) by parameter name, complete on rank 0, empty elsewhere. Collective.

    It synchronises buffers first. The tensors may be those of the model: copy them before another step.
    """
    from torch.distributed.checkpoint import state_dict as dcp

    refuse_wrapper(optimizer)
    share_buffers(model)
    whole = is_sharded(model)
    if not whole and dist.is_initialized() and dist.get_rank():
        return {}, {}
    options = dcp.StateDictOptions(full_state_dict=whole, cpu_offload=whole)
    weights: dict[str, Any] = dcp.get_model_state_dict(model, options=options)
    state: dict[str, Any] = {}
    if optimizer is not None and not optimizer.state:
        # No step was made (with fp16 the first ones may overflow), or there is no state: PyTorch would
        # create one with a step without gradients, which Adam, for example, would count.
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        state = {} if dist.is_initialized() and dist.get_rank() else {FRESH: groups}
    elif optimizer is not None:
        state = dict(dcp.get_optimizer_state_dict(model, optimizer, options=options))
    return weights, state


def refuse_wrapper(optimizer: Any) -> None:
    for inner in vars(optimizer).values() if optimizer is not None else ():
        if not isinstance(inner, torch.optim.Optimizer):
            continue
        if inner.state and inner.state is not optimizer.state:
            raise UsageError(
                f"optimizer: checkpoints would not contain the state of {type(inner).__name__}, which"
                f" {type(optimizer).__name__} wraps; use {type(inner).__name__} alone"
            )


def load_full_state(model: Any, optimizer: Any, weights: dict[str, Any], state: Any) -> None:
    """What `full_state` returned under any strategy and world size. Collective; rank 0's arguments count."""
    from torch.distributed.checkpoint import state_dict as dcp

    several, fresh = several_ranks(), from_rank((state or {}).get(FRESH))
    if optimizer is not None and fresh is not None:
        optimizer.state.clear()
        for group, saved in zip(optimizer.param_groups, fresh, strict=True):
            group.update(saved)
        optimizer = None
    options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=several, strict=False)
    # The optimiser first: PyTorch creates its state with a step at a rate of 0, which with some
    # optimisers still changes the weights slightly.
    if optimizer is not None:
        own: Any = dcp.get_optimizer_state_dict(model, optimizer)["state"]
        if not any(torch.is_tensor(v) and v.dim() for s in own.values() for v in s.values()):
            # There are no tensors to send and place.
            state, options = from_rank(state), dcp.StateDictOptions(strict=False)
        dcp.set_optimizer_state_dict(model, optimizer, Copier().copy(state or {}), options=options)
    options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    dcp.set_model_state_dict(model, dict(weights or {}), options=options)


class Copier:
    """Copies tensors to CPU buffers and uses these again: fresh memory costs page faults, and pinned memory,
    which a GPU copies into at full speed, far more."""

    def __init__(self) -> None:
        self.buffers: dict[Any, Any] = {}
        self.from_gpu = False

    def copy(self, tree: Any) -> Any:
        """The same nesting with CPU tensors, which the next call overwrites."""
        copied = tree_map_with_path(self._copy, tree)
        if self.from_gpu:
            # The next step changes the weights: finish the copies first.
            torch.cuda.synchronize()
        return copied

    def _copy(self, path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        place, pinned = (path, leaf.shape, leaf.dtype), leaf.is_cuda
        self.from_gpu |= pinned
        if place not in self.buffers:
            self.buffers[place] = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=pinned)
        return self.buffers[place].copy_(leaf.detach(), non_blocking=pinned)


def share_buffers(model: Any) -> None:
    """Before buffers are used or saved: running means and variances are averaged over ranks, whose batch
    normalisation has seen different batches (as in timm); all others become rank 0's. Collective."""
    if not several_ranks():
        return
    for name, buffer in plain(model).named_buffers():
        if name.endswith(("running_mean", "running_var")):
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
        else:
            dist.broadcast(buffer, src=0)


def first_record(batch: Batch) -> Batch:
    """A batch of one record; a rank without records gets one from another, as fsdp needs. Collective."""
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, len(next(iter(batch.values()))) if batch else 0)
    own = {name: values[:1] for name, values in batch.items()}
    if all(sizes):
        return own
    there = on_tensors(own, lambda value: value.cpu())
    another = from_rank(there, next(rank for rank, size in enumerate(sizes) if size))
    return own or another
