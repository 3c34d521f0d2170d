"""Carry out a plan on a model: the only code that changes one."""

from collections.abc import Iterator, Mapping, Set
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.launch import PLAIN, is_dense, unsupported_reason
from narrowcast.numerics import plain_format
from narrowcast.precision.fp8.delayed import AmaxHistories, AmaxHistory
from narrowcast.precision.fp8.linear import Fp8Linear
from narrowcast.precision.fp8.quantized_frozen_products import QuantizedFrozenProducts
from narrowcast.precision.fused.elementwise import (
    OnePassGate,
    OnePassGelu,
    OnePassLayerNorm,
    OnePassNorm,
    OnePassTurn,
    forward_turning,
)
from narrowcast.precision.fused.fp8_gated_mlp import Fp8GatedMlp, can_chain
from narrowcast.precision.fused.fp8_mlp import Fp8Mlp, can_fuse
from narrowcast.precision.fused.gelu_mlp import GeluMlp
from narrowcast.precision.fused.gelu_mlp import can_fuse as can_fuse_16_bits
from narrowcast.precision.fused.language_models import (
    attend_as_ever,
    attend_without_mask,
    fuse_loss,
)
from narrowcast.precision.memory.checkpointing import recompute_blocks
from narrowcast.precision.memory.host_activations import offload_blocks
from narrowcast.precision.modules.siblings import siblings_in
from narrowcast.precision.modules.wrappers import (
    Bf16Recurrent,
    EmulatedLinear,
    Fp32Norm,
    MatchingInput,
    NarrowBilinear,
    RoundedNorm,
    Untraced,
    WithoutFastPath,
    compact_bf16,
)
from narrowcast.precision.plan.fusing import causal_models, requested_pieces
from narrowcast.precision.plan.known_modules import (
    GatedMlp,
    gelu_approximation,
    match_gated_mlp,
    match_rms_norm,
)
from narrowcast.precision.plan.module_plan import (
    ModulePlan,
    is_uniform,
    module_kind,
    multiplies,
    needs_one_dtype,
    widens,
)
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.products.operands import ProductFormats
from narrowcast.precision.products.regions import InRegion, PreparedModel, Region, RegionEntry
from narrowcast.precision.swap import fused_mlp_layers, has_own_forward, plain_class, restore, swap

CPU_CHUNK_ROWS = 1024
"""Rows of logits that a CPU holds at once; a GPU knows by itself how many."""


def fuse_pieces(model: nn.Module, plan: Plan) -> None:
    """Make the modules of each fused piece compute it as one."""
    device = torch.device(plan.hardware.device)
    without_masks = any(piece.fused for piece in plan.fused if piece.piece == "mask")
    for piece in plan.fused:
        if piece.piece == "mask" and not piece.fused and without_masks:
            for name in piece.modules:
                attend_as_ever(model.get_submodule(name))
        if piece.fused and piece.piece == "loss":
            _fuse_losses(model, set(piece.modules), device)
        elif piece.fused:
            for name in piece.modules:
                _fuse_module(model.get_submodule(name), piece.piece, plan, device.type)


def _fuse_losses(model: nn.Module, names: Set[str], device: torch.device) -> None:
    chunk_rows = CPU_CHUNK_ROWS if device.type == "cpu" else None
    for result in list(causal_models(model)):
        if result.name in names:
            fuse_loss(model.get_submodule(result.name), result.head, chunk_rows=chunk_rows)


def _fuse_module(module: nn.Module, piece: str, plan: Plan, device: str) -> None:
    where = {"nc_device": device, "nc_compiled": requested_pieces(plan.fuse) is not None}
    widened = plan.policy.params != "fp32"  # a norm in fp32 between 16-bit neighbours
    match piece:
        case "mask":
            attend_without_mask(module)
        case "layer_norm":
            swap(module, OnePassLayerNorm, nc_widened=widened, **where)
        case "gelu":
            swap(module, OnePassGelu, nc_approximation=gelu_approximation(module), **where)
        case "rms_norm":
            swap(module, OnePassNorm, nc_norm=match_rms_norm(module), nc_widened=widened, **where)
        case "swiglu":
            known = match_gated_mlp(module)
            swap(module, OnePassGate, nc_mlp=known, **where)
            if isinstance(known, GatedMlp) and can_chain(module, known):
                swap(module, Fp8GatedMlp, nc_chain=known)
        case _:
            swap(module, OnePassTurn, nc_turning=forward_turning(module, device), **where)


_Held = TypeVar("_Held")


def rewrite(
    model: nn.Module, plan: Plan, trained: Set[nn.Parameter]
) -> list[tuple[nn.Parameter, Tensor]]:
    """Give every module its formats; return the trained weights now in 16 bits and in fp32."""
    rewrite_modules(model, plan)
    return _cast_weights(model, plan, trained)


def rewrite_modules(model: nn.Module, plan: Plan) -> None:
    """Set the formats of every module; leave the stored weights unchanged."""
    try:
        regions = _give_formats(model, plan)
        _give_histories(model, plan)
        _fuse_mlps(model, plan)
        fuse_pieces(model, plan)
        _allow_kernels(model, plan)
        _close_fast_paths(model, plan)
        _give_entries(model, regions)
        recompute_blocks(model, plan.memory)
        offload_blocks(model, plan.memory)  # around the former: of those, inputs are kept
    except BaseException:
        restore(model)  # all or nothing
        raise


def _give_formats(model: nn.Module, plan: Plan) -> dict[str, Region]:
    """Set the formats of the modules of a plan; return the regions by their first module."""
    device_type = torch.device(plan.hardware.device).type
    regions = {"": Region.of(plan)}
    for module_plan in plan.modules:
        module = model.get_submodule(module_plan.name)
        around = _around(module_plan.name.rpartition(".")[0], regions)
        match module_plan.kind:
            case "normalisation":
                _rewrite_norm(module, module_plan, plan.policy, device_type)
            case "linear" if _needs_own_products(module_plan, around):
                autocast = device_type if around.is_of_16_bits else None
                _rewrite_linear(module, module_plan, autocast)
            case "embedding":
                if isinstance(module, nn.EmbeddingBag):
                    swap(module, MatchingInput)  # its weights of samples must be of one dtype
            case _:
                policy = module_plan.policy
                if policy.functional != around.format_name:
                    emulated = around.emulated or module_plan.how == "emulated" or widens(policy)
                    region = Region(policy.functional, emulated, device_type, policy.reduce)
                    regions[module_plan.name] = region
                region = regions.get(module_plan.name, around)
                if module_plan.kind == "recurrent":
                    _rewrite_recurrent(module, module_plan, plan, region)
                elif isinstance(module, nn.Bilinear) and region.is_native_16_bits:
                    swap(module, NarrowBilinear)
    return regions


def _rewrite_linear(module: nn.Module, module_plan: ModulePlan, autocast: str | None) -> None:
    """Set the product formats of a linear layer."""
    settings: dict[str, object] = {
        "nc_formats": ProductFormats.of(module_plan.policy),
        "nc_autocast": autocast,
    }
    if module_plan.frozen is not None:
        swap(module, QuantizedFrozenProducts, nc_native=module_plan.how == "native", **settings)
    else:
        kind = EmulatedLinear if module_plan.how == "emulated" else Fp8Linear
        swap(module, kind, nc_history=None, **settings)


def _give_entries(model: nn.Module, regions: Mapping[str, Region]) -> None:
    """Make every module with weights enter its region if it is not active."""
    prepared = PreparedModel(model)
    entries = {name: RegionEntry(region, prepared) for name, region in regions.items()}
    by_hand: set[nn.Module] = set()  # a parametrised weight is computed at each access
    for name, module in model.named_modules():
        if isinstance(module, ParametrizationList):
            by_hand |= set(module.modules())
        called = plain_class(module).forward is not nn.Module.forward or has_own_forward(module)
        weighs = next(module.parameters(), None) is not None and multiplies(module_kind(module))
        if name in entries or (called and weighs and module not in by_hand):
            entry = _around(name, entries)
            begins = name in entries and (name != "" or not entry.region.is_plain)
            narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters())
            marks = {"nc_begins": begins, "nc_narrow": narrow, "nc_is_model": module is model}
            if name in entries and name != "":
                outside = _around(name.rpartition(".")[0], entries).region
                marks["nc_widens"] = entry.region.is_of_16_bits and not outside.is_of_16_bits
            swap(module, InRegion, nc_entry=entry, **marks)


def weight_formats(
    model: nn.Module, plan: Plan, trained: Set[nn.Parameter]
) -> dict[nn.Parameter, str]:
    """Return the storage format of each trained weight; shared ones have the wider format.

    Recurrent layers and normalisations need weights of one dtype: beside frozen ones they stay
    unchanged. So does a weight that torch's older `spectral_norm` multiplies by fp32 vectors.
    """
    wanted: dict[nn.Parameter, str] = {}
    for module_plan in plan.modules:
        module = model.get_submodule(module_plan.name)
        own = list(module.parameters(recurse=module_plan.kind == "attention"))
        wide = needs_one_dtype(module_plan.kind) and not trained >= set(own)
        wide = wide or any(isinstance(h, SpectralNorm) for h in module._forward_pre_hooks.values())
        inputs = "fp32" if wide else module_plan.policy.params
        for parameter in own:
            if parameter in trained:
                before = wanted.get(parameter, inputs)
                wanted[parameter] = "fp32" if "fp32" in (before, inputs) else before
    return wanted


def _around(name: str, regions: Mapping[str, _Held]) -> _Held:
    """Return what the module of this name has, or the nearest above it; the model's is `""`."""
    while name and name not in regions:
        name = name.rpartition(".")[0]
    return regions[name]


def _needs_own_products(module_plan: ModulePlan, around: Region) -> bool:
    """Return whether a linear layer multiplies in another way than the region around it."""
    match module_plan.how:
        case "unchanged":
            return False
        case "native":
            return not is_uniform(module_plan.policy)
        case "emulated" if module_plan.frozen:
            return True  # a region would emulate the forward pass, and know nothing of the other
        case "emulated":
            like_region = around.emulated and module_plan.policy.forward == around.format_name
            return not (like_region and is_uniform(module_plan.policy))


def _give_histories(model: nn.Module, plan: Plan) -> None:
    """Give every module with delayed scaling its part of what all of them remember."""
    delayed = [
        module
        for module_plan in plan.modules
        if module_plan.policy.scaling == "delayed"
        and isinstance(module := model.get_submodule(module_plan.name), Fp8Linear | EmulatedLinear)
    ]
    if not delayed:
        return
    device = next(delayed[0].parameters()).device
    histories = AmaxHistories([module.nc_formats for module in delayed], device)
    for i, module in enumerate(delayed):
        module.nc_history = histories.of(i)
    # A compiler makes one cast of those that have one scale; eager layers find it out themselves.
    for siblings in siblings_in(model):
        matches = [each.__dict__.get("nc_history") for each in siblings]
        stored = [each for each in matches if isinstance(each, AmaxHistory)]
        for each in stored[1:]:
            each.reads_with(stored[0])


def _fuse_mlps(model: nn.Module, plan: Plan) -> None:
    """Run modules as one that promise to be a chain of layers in the same formats."""
    by_name = {each.name: each for each in plan.modules}
    for name, module in list(model.named_modules()):
        ends = fused_mlp_layers(module)
        if ends is None:
            continue
        if can_fuse(module):
            swap(module, Fp8Mlp, nc_layers=ends)
        elif can_fuse_16_bits(module, device=torch.device(plan.hardware.device)):
            plans = [by_name.get(f"{name}.{end}".lstrip(".")) for end in ends]
            formats = {_format_of_16_bits(each) for each in plans}
            if len(formats) == 1 and (one := formats.pop()):
                swap(module, GeluMlp, nc_layers=ends, nc_dtype=storage_dtype(one))


def _rewrite_recurrent(
    module: nn.Module, module_plan: ModulePlan, plan: Plan, region: Region
) -> None:
    narrow = isinstance(module, nn.RNNBase) and region == Region(
        "bf16", False, "cuda", region.reduce
    )
    if narrow:
        swap(module, Bf16Recurrent)
    elif module_plan.policy.params != "fp32" or plan.policy.params != "fp32" or plan.emulated:
        # Its neighbours may be in 16 bits, or it alone; an autocast would not mind.
        swap(module, MatchingInput)
    if narrow or region.emulated:
        swap(module, Untraced)


def _format_of_16_bits(module_plan: ModulePlan | None) -> str:
    """Return the common format of all products of a module on a GPU; empty if they differ."""
    if module_plan is None or module_plan.how != "native" or not is_uniform(module_plan.policy):
        return ""
    return module_plan.policy.forward if module_plan.policy.forward in ("bf16", "fp16") else ""


def _allow_kernels(model: nn.Module, plan: Plan) -> None:
    """Use the faster 16-bit code paths of modules on a GPU."""
    device = torch.device(plan.hardware.device)
    region = Region.of(plan)
    if device.type != "cuda" or unsupported_reason(device) or region.emulated:
        return
    if region.format_name in ("bf16", "fp16"):
        for module in model.modules():
            if hasattr(type(module), "nc_kernels"):
                module.__dict__["nc_kernels"] = True


def _close_fast_paths(model: nn.Module, plan: Plan) -> None:
    """Make torch's transformers use their formats in evaluation too."""
    if any(each.policy.functional != "fp32" for each in plan.modules):
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                swap(module, WithoutFastPath)


def _rewrite_norm(
    module: nn.Module, module_plan: ModulePlan, policy: Policy, device_type: str
) -> None:
    if module_plan.policy.reduce != "fp32":
        swap(module, RoundedNorm, nc_dtype=storage_dtype(module_plan.policy.reduce))
    elif policy.params != "fp32":
        # One forward for all of torch's own but SyncBatchNorm, which wants one dtype. On a CPU
        # torch rounds mean and deviation to 16 bits where it is compiled.
        of_torch = plain_class(module).forward is _BatchNorm.forward and not has_own_forward(module)
        swap(module, Fp32Norm, nc_widens_itself=of_torch and device_type == "cuda")


def _cast_weights(
    model: nn.Module, plan: Plan, trained: Set[nn.Parameter]
) -> list[tuple[nn.Parameter, Tensor]]:
    """Cast trained weights to their storage format."""
    lowered = []
    for parameter, name in weight_formats(model, plan, trained).items():
        if name == "fp32" or not parameter.is_floating_point():
            continue
        full = parameter.data
        parameter.data = full.to(storage_dtype(name))
        wide = plan.policy.grads_format == "fp32"
        set_grad_dtype(parameter, torch.float32 if wide else parameter.dtype)
        lowered.append((parameter, full))
    compact_recurrent(model)
    return lowered


def set_grad_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Set the dtype of a weight's gradients if it differs."""
    # Once set, torch keeps it whatever the weight's own dtype becomes.
    if parameter.grad_dtype != dtype:
        parameter.grad_dtype = dtype


def storage_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a storage format."""
    dtype = plain_format(name).dtype
    assert dtype is not None
    return dtype


def check_shared_memory(model: nn.Module, trained: Set[nn.Parameter], plan: Plan) -> None:
    """Check that no 16-bit weight shares memory with another weight or a buffer, and raise."""
    narrow = {m.name: m.policy.params for m in plan.modules if m.policy.params != "fp32"}
    if not narrow:
        return
    held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lowered = {
        n: narrow[_owner(n)] for n, t in held.items() if t in trained and _owner(n) in narrow
    }
    for one, other in _overlapping(held):
        stored = lowered.get(one) or lowered.get(other)
        if stored is not None:
            stay = " and ".join(f"`{_owner(name) or '*'}: params=fp32`" for name in (one, other))
            raise UnsupportedError(
                f"{other} shares memory with {one}, but params={stored} stores them separately, "
                "which would untie them. Use one Parameter in both modules, multiply by a view of "
                f"it in forward(), or write {stay} in the policy."
            )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _overlapping(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors that share an element, in the order of the model."""
    places = {name: i for i, name in enumerate(tensors)}
    begun = sorted(
        (str(t.device), t.data_ptr(), name)
        for name, t in tensors.items()
        if type(t) in (*PLAIN, nn.Buffer) and t.numel() and t.device.type != "meta"
    )
    before: list[tuple[str, int, str]] = []
    for device, begin, name in begun:
        before = [each for each in before if each[0] == device and each[1] > begin]
        for _, _, other in before:
            if _share_an_element(tensors[other], tensors[name]):
                one, two = sorted((other, name), key=places.__getitem__)
                yield one, two
        before.append((device, begin + _extent(tensors[name]), name))


def _extent(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _share_an_element(first: Tensor, second: Tensor) -> bool:
    """Return whether tensors with overlapping extents share an element; `first` begins first."""
    if is_dense(first) and is_dense(second):
        return True
    # Columns of one matrix, say, lie in between one another.
    begin, size = first.data_ptr(), first.element_size()
    separate = second.data_ptr() - begin
    if size != second.element_size() or separate % size:
        return True  # of other formats, over one another
    length = max(_extent(first), separate + _extent(second)) // size
    touched = torch.zeros(length, dtype=torch.bool)
    touched.as_strided(first.shape, first.stride(), 0).fill_(True)
    return bool(touched.as_strided(second.shape, second.stride(), separate // size).any())


def compact_recurrent(model: nn.Module, *, only: Set[nn.Parameter] | None = None) -> None:
    """Lay the weights of recurrent layers together again, for layers with `only` these."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and (only is None or only >= set(module.parameters())):
            module.flatten_parameters()
            compact_bf16(module)
