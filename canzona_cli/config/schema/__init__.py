"""The typed schema of a run's configuration.

The classes are plain frozen dataclasses, so other modules can use them without depending on Hydra.
`canzona_cli.config.compose` fills them in and reports all mistakes at once. `canzona_cli.cluster.fit` later
chooses values for many of the fields that are still None. For other fields, null means what their help texts
say, or that there is no value. To add a setting, add one annotated field here (`canzona_cli.fields`), and a
line to each recipe that needs a value other than the default.
"""

from canzona_cli.config.schema.cluster import ClusterConfig, Collective, Device, FastPath
from canzona_cli.config.schema.optimizer import OPTIMIZERS, CustomConfig, OptimizerConfig, OptimizerName, UpdateName
from canzona_cli.config.schema.run import (
    CheckpointConfig,
    EngineConfig,
    Execution,
    Gathering,
    Layout,
    Mesh,
    Mode,
    MuonTpMode,
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
    NorMuonConfig,
)
from canzona_cli.optimizers.shampoo_facts import (
    KroneckerConfig,
    ShampooConfig,
    SoapConfig,
)
