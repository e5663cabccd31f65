"""Classifiers by name: those of Chiang et al. (2020), your own, and files that hold their weights."""

from patchcert.models import architectures as architectures
from patchcert.models.joining import join as join
from patchcert.models.layers import Normalize as Normalize
from patchcert.models.onnx import OnnxNetwork as OnnxNetwork
from patchcert.models.onnx import load_onnx as load_onnx
from patchcert.models.onnx import save_onnx as save_onnx
from patchcert.models.registry import ModelSpec as ModelSpec
from patchcert.models.registry import architecture as architecture
from patchcert.models.registry import build as build
from patchcert.models.registry import names as names
from patchcert.models.storage import copy_weights as copy_weights
from patchcert.models.storage import is_half as is_half
from patchcert.models.storage import load as load
from patchcert.models.storage import load_weights as load_weights
from patchcert.models.storage import save as save
from patchcert.models.storage import state_sha256 as state_sha256
from patchcert.models.trimming import round_to_half as round_to_half
from patchcert.models.trimming import trim as trim
