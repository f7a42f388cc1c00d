"""How single programs and other processes compile, if not as `conftest.py` has it for this one."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# For `compile(compiler_options=...)` and `jax.jit(compiler_options=...)`. The first brings back the HLO that users get, for tests that look
# into it. The second is all of JAX's own choice, for one of the contexts in `test_contexts.py`, which so compares, to the bit, what users
# run with what the other tests run.
HLO_OF_USERS: dict[str, Any] = {"xla_cpu_use_fusion_emitters": True}
AS_USERS_DO: dict[str, Any] = HLO_OF_USERS | {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}

_OURS = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")


def environment(path: Iterable[str], cache: Path | None = None) -> dict[str, str]:
    """Of another Python process, which imports from `path`: it compiles as this one does, and shares what it compiles in `cache`."""
    kept = {name: x for name, x in os.environ.items() if name in _OURS or not name.startswith(("JAX_", "XLA_", "PYTHONWARNINGS"))}
    if cache is not None:
        kept |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, path))}
