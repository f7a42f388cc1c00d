"""Gradient sparsification for JAX: ExDyna and its rivals as optax transformations."""

from exdyna_jax._clt_k import clt_k as clt_k
from exdyna_jax._consensus import average_params as average_params
from exdyna_jax._consensus import consensus_distance as consensus_distance
from exdyna_jax._consensus import replicate_params as replicate_params
from exdyna_jax._deft import deft as deft
from exdyna_jax._dense import dense as dense
from exdyna_jax._exdyna import exdyna as exdyna
from exdyna_jax._gossip import GossipState as GossipState
from exdyna_jax._gossip import crossover as crossover
from exdyna_jax._gossip import sgp as sgp
from exdyna_jax._gradients import local_value_and_grad as local_value_and_grad
from exdyna_jax._gtop_k import gtop_k as gtop_k
from exdyna_jax._hard_threshold import hard_threshold as hard_threshold
from exdyna_jax._metrics import Metrics as Metrics
from exdyna_jax._micro import micro as micro
from exdyna_jax._plan import Cost as Cost
from exdyna_jax._plan import Plan as Plan
from exdyna_jax._plan import plan as plan
from exdyna_jax._replicas import assert_replicas_equal as assert_replicas_equal
from exdyna_jax._sidco import sidco as sidco
from exdyna_jax._sparsify import SparsifyState as SparsifyState
from exdyna_jax._state import metrics as metrics
from exdyna_jax._state import reshard as reshard
from exdyna_jax._state import state_specs as state_specs
from exdyna_jax._top_k import top_k as top_k
from exdyna_jax._traffic import Collective as Collective
from exdyna_jax._traffic import assert_sparse_traffic as assert_sparse_traffic
from exdyna_jax._traffic import traffic as traffic

__version__ = "0.1.0"
