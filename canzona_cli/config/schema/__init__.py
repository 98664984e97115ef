"""The typed schema of a run's configuration.

Plain frozen dataclasses, so that other modules can use them without depending on Hydra.
`canzona_cli.config.compose` fills them and reports all mistakes at once. Many fields that are None after
composition are chosen later by `canzona_cli.cluster.fit`; for the others the help says what null means. A new
setting is one annotated field here (`canzona_cli.fields`), and a line in a recipe if the default does not
suit it.
"""

from canzona_cli.config.schema.cluster import ClusterConfig, Collective, Device
from canzona_cli.config.schema.optimizer import OPTIMIZERS, CustomConfig, OptimizerConfig, OptimizerName, UpdateName
from canzona_cli.config.schema.run import (
    BufferLayout,
    CheckpointConfig,
    EngineConfig,
    Execution,
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
    Dispatcher,
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
