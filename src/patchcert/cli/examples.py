"""What help shows beside options: examples of every command, and which options belong together."""

from typing import Any

from typer.core import TyperCommand

EXAMPLES = """
patchcert demo --quick
patchcert demo --out demo-run
patchcert train paper-mnist --scale 0.1 --out runs/mlp
patchcert train paper-mnist --set model.name=cnn2 --set threat.stamp=2x2
patchcert choose trial.toml --out trials/results
patchcert choose trial.toml --out trials/results --device cuda
patchcert certify zoo:mnist-5x5-cnn2 --limit 100
patchcert certify my_models:network --weights weights.pt --data cifar10 --patch 5 --method masking --masks 6
patchcert predict runs/masked --limit 10
patchcert predict zoo:mnist-2x2-cnn2 digit.png --method masking --masks 6
patchcert explain zoo:mnist-5x5-cnn2 7 --data mnist-mini
patchcert explain zoo:mnist-2x2-cnn2 digit.png --method masking --masks 6 --out why.html
patchcert attack zoo:mnist-5x5-cnn2 --images 100 --search sweep
patchcert attack runs/mlp --certified-only
patchcert compare runs/bands runs/masked --published
patchcert compare runs/bands others.json --write ours.json
patchcert reproduce strategy-detail-5x5 --scale quick
patchcert reproduce all --from results
patchcert audit results
patchcert audit results --reprove 20 --data-dir ~/data
patchcert report runs/mlp
patchcert report proof.npz attack.npz --out page.html
patchcert export zoo:mnist-5x5-cnn2 --onnx cnn2.onnx
patchcert export zoo:mnist-5x5-mlp --vnnlib properties --placements corners --limit 10
patchcert bench
patchcert bench --only mlp --json
patchcert join runs/mlp-2019 runs/mlp-2020 runs/mlp-2021 --out runs/joined.safetensors
patchcert join zoo:mnist-5x5-mlp runs/mlp --out runs/joined.safetensors
patchcert trim runs/cnn5w --out runs/cnn5w-trimmed
patchcert trim runs/cnn5w --half --out runs/cnn5w-trimmed
patchcert zoo list
patchcert zoo list --json
patchcert zoo show mnist-5x5-cnn2
patchcert zoo show mnist-5x5-mlp --zoo my-zoo
patchcert zoo spec mnist-5x5-cnn2
patchcert zoo spec mnist-5x5-mlp --zoo my-zoo
patchcert zoo copy mnist-5x5-cnn2 --out runs/cnn2
patchcert zoo copy mnist-5x5-mlp --zoo my-zoo --out runs/mlp
patchcert zoo add runs/mlp --zoo my-zoo
patchcert zoo add runs/mlp --results results
patchcert data list
patchcert data list --data-dir ~/data
patchcert data fetch mnist
patchcert data fetch cifar10 --data-dir ~/data
patchcert data verify mnist
patchcert data verify cifar10 --data-dir ~/data
patchcert data labels mnist --out labels.bin
patchcert data labels cifar10 --data-dir ~/data --out labels.bin
""".strip().splitlines()
"""Command lines, two at least for each command."""

PANELS = {
    "Model": "weights normalise image_size",
    "Threat": "patch shape sparse bound placements patches camera",
    "Images": "data data_dir split images limit label",
    "Proof": "method setting masks dtype memory_budget refine",
    "Attack": "seed steps step_size restarts loss search universal transform certified_only batch_size",
    "Defense": "defense adaptive tune largest_drop",
}
"""Options that belong together, wherever they occur; all others are just options."""


class GroupedCommand(TyperCommand):
    """A command whose help has a panel for options that belong together."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - from version to version others
        """Put two or more options of a panel into it, then print."""
        for panel, names in PANELS.items():
            options = [each for each in self.params if each.name in names.split()]
            for option in options if len(options) > 1 else ():
                vars(option)["rich_help_panel"] = panel
        super().format_help(ctx, formatter)


def epilog(command: str) -> str | None:
    """The first examples of a command as its help ends with them; None for one that has none."""
    found = [line for line in EXAMPLES if f"{line} ".startswith(f"patchcert {command} ")]
    return "Examples:\n\n" + "\n\n".join(f"- `{line}`" for line in found[:2]) if found else None
