"""Eight virtual CPU devices, and JAX at its strictest."""

import os

# nearly all the time of the tests goes into compiling programs that run for a moment: machine code is not optimised
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("exdyna", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("exdyna")
