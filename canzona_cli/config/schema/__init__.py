"""The typed schema of a run: what a recipe, its groups and the overrides come to.

Plain frozen dataclasses, so that every other module can use them without knowing how they were filled.
`canzona_cli.config.compose` fills them from Hydra and reports all mistakes at once. A field whose type admits
`None` is chosen by `canzona_cli.cluster.fit` unless the user sets it; every other field has its value after
composition. A new setting is one field here, with its `About`, and a line in a recipe where its default is
not enough.
"""

from canzona_cli.config.schema.cluster import ClusterConfig, Collective, Device
from canzona_cli.config.schema.optimizer import OPTIMIZERS, CustomConfig, OptimizerConfig, OptimizerName, UpdateName
from canzona_cli.config.schema.run import (
    BufferLayout,
    CheckpointConfig,
    EngineConfig,
    Gathering,
    Grouping,
    Layout,
    Mesh,
    Mode,
    Reduction,
    RunConfig,
    RunSettings,
    Splitting,
    Strategy,
    TrackerName,
)
from canzona_cli.config.schema.training import (
    DataConfig,
    DecayStyle,
    Divergence,
    LossSpike,
    ModelConfig,
    NonFinite,
    ParallelConfig,
    Recompute,
    ScheduleConfig,
    TrainConfig,
)
from canzona_cli.fields import Precision
from canzona_cli.optimizers.adamw_facts import AdamWConfig
from canzona_cli.optimizers.facts import Clip, Form, OptimizerBase, RootMethod
from canzona_cli.optimizers.muon_facts import (
    STANDARD_ONLY,
    MomentumConfig,
    MuonConfig,
    NewtonSchulzConfig,
    NorMuonConfig,
)
from canzona_cli.optimizers.shampoo_facts import (
    KLShampooConfig,
    KroneckerConfig,
    ShampooConfig,
    SoapConfig,
    SoapMuonConfig,
)
