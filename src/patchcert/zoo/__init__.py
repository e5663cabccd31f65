"""Trained models that come with the package, each with a card of what was counted for it."""

from patchcert.zoo.card import Card as Card
from patchcert.zoo.shelf import Zoo as Zoo
from patchcert.zoo.shelf import card as card
from patchcert.zoo.shelf import load as load
from patchcert.zoo.shelf import names as names
from patchcert.zoo.shelf import shipped as shipped
