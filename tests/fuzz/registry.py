"""Every target, in the order of the reports."""

from __future__ import annotations

from tests.fuzz.target import Target
from tests.fuzz.targets.cache_files import CacheFiles
from tests.fuzz.targets.coded_tensors import CodedArrays
from tests.fuzz.targets.configurations import Configurations
from tests.fuzz.targets.encoded_files import EncodedBytes, EncodedPayloads, EncodedStructures
from tests.fuzz.targets.exports import Exports
from tests.fuzz.targets.gguf_exports import GgufExports
from tests.fuzz.targets.gguf_imports import GgufFiles, GgufImports
from tests.fuzz.targets.imports import ImportedDirectories, ImportedWeights
from tests.fuzz.targets.model_directories import ModelDirectories, ModelFiles
from tests.fuzz.targets.onnx_exports import OnnxExports
from tests.fuzz.targets.pickled_weights import PickledFiles, PickledWeights
from tests.fuzz.targets.programs import OnnxFiles, ProgramExports
from tests.fuzz.targets.run_directories import Manifests, RunDirectories
from tests.fuzz.targets.single_files import SavedWeights, SingleFiles
from tests.fuzz.targets.training_states import TrainingStates

_TARGETS: tuple[type[Target], ...] = (
    EncodedBytes,
    EncodedStructures,
    EncodedPayloads,
    CodedArrays,
    PickledWeights,
    PickledFiles,
    Configurations,
    ModelFiles,
    ModelDirectories,
    Manifests,
    RunDirectories,
    TrainingStates,
    SingleFiles,
    SavedWeights,
    CacheFiles,
    ImportedWeights,
    ImportedDirectories,
    GgufFiles,
    GgufImports,
    Exports,
    GgufExports,
    OnnxExports,
    OnnxFiles,
    ProgramExports,
)
TARGETS: dict[str, type[Target]] = {target.name: target for target in _TARGETS}
