"""Eight virtual CPU devices, and JAX at its strictest."""

import os

# nearly all the time goes into compiling what runs for a moment; other processes inherit it, and so get the same numbers
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("exdyna", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("exdyna")
