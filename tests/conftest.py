"""Eight virtual CPU devices, and JAX at its strictest."""

import os
from collections.abc import Iterator
from pathlib import Path

# Nearly all the time goes into compiling what runs for a moment. So LLVM optimizes nothing, and kernels are made from HLO directly, not by
# way of MLIR; a scatter is then a loop. Other processes inherit it, and so get the same numbers. `compiling.py` undoes it.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("exdyna", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("exdyna")


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which all runs of a module share what they compile; for other processes see `compiling.environment`."""
    folder = tmp_path_factory.mktemp("compiled")
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def standard_promotion() -> Iterator[None]:
    """Optax's schedules ask for it."""
    with jax.numpy_dtype_promotion("standard"):
        yield
