"""Exact bounds for every placement of a patch, computed on the small windows of feature maps that a patch can reach.

docs/concepts/windows.md explains how it works. The modules, from below:

- `layout`: where a patch can be seen in each feature map
- `passes`: the pass over the unchanged images (`Clean`), which all placements share, and passes of windows
- `rules`: what each operation does to windows; `kernels` are its steps on CUDA
- `blocks`: blocks of placements whose bounds are merged
- `sweep`: margins at every placement; `verdicts`: verdicts without margins
- `dense`: the slow, obvious way, which windows are held equal to and fall back on
- `training`: the search for the weakest placements, and margins there with a gradient

`covering_` functions give None where windows cannot follow the network, so that only the dense way is left.
"""
