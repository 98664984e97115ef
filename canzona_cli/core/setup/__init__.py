"""The typed schema of a run's configuration.

The classes are plain frozen dataclasses, so other modules can use them without depending on Hydra.
`canzona_cli.config.compose` fills them in and reports all mistakes at once. `canzona_cli.core.simulate.fit` later
chooses values for many of the fields that are still None. For other fields, null means what their help texts
say, or that there is no value. To add a setting, add one annotated field here (`canzona_cli.core.fields`), and a
line to each recipe that needs a value other than the default.
"""

from canzona_cli.core.fields import Fp8Recipe, Precision
from canzona_cli.core.optimizers.facts import AdamWConfig, Form, OptimizerBase, RootMethod
from canzona_cli.core.optimizers.muon_facts import (
    MomentumConfig,
    MuonConfig,
    NorMuonConfig,
)
from canzona_cli.core.optimizers.shampoo_facts import (
    KroneckerConfig,
    ShampooConfig,
    SoapConfig,
)
from canzona_cli.core.setup.cluster import (
    ClusterConfig,
    Collective,
    Device,
    FastPath,
    HashedOnce,
)
from canzona_cli.core.setup.layout import Layout, Mesh
from canzona_cli.core.setup.sections import (
    OPTIMIZERS,
    PARTS_OF_LLAMA,
    CustomConfig,
    DecayStyle,
    Dispatcher,
    Divergence,
    EngineConfig,
    Gathering,
    Mode,
    ModelConfig,
    MuonTpMode,
    NonFinite,
    OptimizerConfig,
    OptimizerName,
    ParallelConfig,
    Recompute,
    Reduction,
    ScheduleConfig,
    Splitting,
    Strategy,
    TrainConfig,
    UpdateName,
)
from canzona_cli.core.setup.setup import Execution, Setup
