"""ONNX files: networks read from them, networks written to them, and the runtime that both are compared with."""

from patchcert.models.onnx.reading import OnnxNetwork as OnnxNetwork
from patchcert.models.onnx.reading import load_onnx as load_onnx
from patchcert.models.onnx.writing import save_onnx as save_onnx
