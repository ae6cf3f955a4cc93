"""Maps each higher-order primitive to the function that runs it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jmp_lite.autocasting.interpreter.calls import (
    run_jit,
    run_remat,
    run_shard_map,
    run_wrapped,
)
from jmp_lite.autocasting.interpreter.control_flow import (
    run_cond,
    run_scan,
    run_while,
)
from jmp_lite.autocasting.interpreter.conversion import (
    Call,
    Walk,
)
from jmp_lite.autocasting.interpreter.custom_rules import (
    run_custom_jvp,
    run_custom_vjp,
    run_custom_vmap,
)
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.jaxprs import params

HANDLERS: Mapping[str, Callable[[Walk, Call], list[Value]]] = MappingProxyType(
    {
        "jit": run_jit,
        **dict.fromkeys(params.REMAT, run_remat),
        **dict.fromkeys(params.WRAPPERS, run_wrapped),
        "cond": run_cond,
        "shard_map": run_shard_map,
        "scan": run_scan,
        "while": run_while,
        "custom_jvp_call": run_custom_jvp,
        "custom_vjp_call": run_custom_vjp,
        "custom_vmap_call": run_custom_vmap,
    }
)
