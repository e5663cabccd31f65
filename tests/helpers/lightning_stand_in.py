"""As much of Lightning as the example in the documents uses, where it is not installed."""

from torch import nn


class LightningModule(nn.Module):
    """A module that knows how many steps it was trained for."""

    global_step = 0

    def log(self, name, value):
        """Loggers are left out."""


class Trainer:
    """Calls `training_step` for each batch, as Lightning's automatic optimisation does."""

    def __init__(self, max_epochs, accelerator, logger, enable_checkpointing):
        self.max_epochs = max_epochs

    def fit(self, module, loader):
        """Train on all batches of the loader, once for each epoch."""
        module.train()
        optimiser = module.configure_optimizers()
        for _ in range(self.max_epochs):
            for number, batch in enumerate(loader):
                optimiser.zero_grad()
                module.training_step(batch, number).backward()
                optimiser.step()
                module.global_step += 1
