"""Small transformers, and networks that normalise by the image, for images (n, 3, 16, 16) and ten classes."""

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 10


class Block(nn.Module):
    """Attention as libraries of transformers write it, by `attend` of queries, keys and values."""

    def __init__(self, width, heads, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        batch, tokens, width = x.shape
        parts = self.qkv(self.first(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        seen = self.attend(*parts.permute(2, 0, 3, 1, 4).unbind(0))
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.second(x))


def by_products(query, key, value):
    return (query @ key.transpose(-2, -1) / 2).softmax(dim=-1) @ value


def by_einsum(query, key, value):
    shares = torch.einsum("bhid,bhjd->bhij", query, key).softmax(dim=-1)
    return torch.einsum("bhij,bhjd->bhid", shares, value)


class ClassTokenTransformer(nn.Module):
    def __init__(self, attend, channels=3, size=16, patch=4, width=8):
        super().__init__()
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width))
        self.block, self.norm, self.head = (
            Block(width, 2, attend),
            nn.LayerNorm(width),
            nn.Linear(width, CLASSES),
        )

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], 1) + self.position
        return self.head(self.norm(self.block(tokens))[:, 0])


class TorchTransformer(nn.Module):
    """The layers of PyTorch, with tokens in front of the batch or behind it, and their mean at the end."""

    def __init__(self, batch_first, width=8):
        super().__init__()
        self.batch_first, self.embed = batch_first, nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(torch.randn(1, width, 16))
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        tokens = self.embed(x).flatten(2) + self.position
        seen = self.encoder(tokens.permute(0, 2, 1) if self.batch_first else tokens.permute(2, 0, 1))
        return self.head(seen.mean(1 if self.batch_first else 0))


class WeighedAttention(nn.Module):
    """nn.MultiheadAttention as it is called unless the weights are declined."""

    def __init__(self, width=8):
        super().__init__()
        self.embed, self.attention = nn.Conv2d(3, width, 4, 4), nn.MultiheadAttention(width, 2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).permute(2, 0, 1)
        return self.head((tokens + self.attention(tokens, tokens, tokens)[0])[0])


class ShiftedWindows(nn.Module):
    """Attention within windows of a rolled map, which stand in the batch, then patches are merged, as in a Swin."""

    def __init__(self, width=8, window=2, heads=2):
        super().__init__()
        self.window, self.heads = window, heads
        self.embed, self.norm = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(4 * width, CLASSES)
        self.position = nn.Parameter(torch.randn(heads, window**2, window**2))
        self.register_buffer("mask", -100 * torch.rand(4, 1, window**2, window**2).round())

    def forward(self, x):
        x = self.embed(x).permute(0, 2, 3, 1)
        batch, height, width, channels = x.shape
        parts = height // self.window, self.window, width // self.window, self.window
        windows = self.norm(x).roll((-1, -1), (1, 2)).view(batch, *parts, channels).permute(0, 1, 3, 2, 4, 5)
        seen = self.attend(windows.reshape(-1, self.window**2, channels))
        seen = seen.view(batch, parts[0], parts[2], parts[1], parts[3], channels).permute(0, 1, 3, 2, 4, 5)
        x = x + seen.reshape(batch, height, width, channels).roll((1, 1), (1, 2))
        merged = [x[:, top::2, left::2] for left in (0, 1) for top in (0, 1)]
        return self.head(torch.cat(merged, -1).mean((1, 2)))

    def attend(self, windows):
        count, tokens, channels = windows.shape
        parts = self.qkv(windows).reshape(count, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].transpose(-2, -1) + self.position
        scores = scores.view(-1, *self.mask.shape[:1], self.heads, tokens, tokens) + self.mask
        shares = scores.view(-1, self.heads, tokens, tokens).softmax(-1)
        return (shares @ parts[2]).transpose(1, 2).reshape(count, tokens, channels)


def normalised_by_groups():
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 4),
        nn.GroupNorm(2, 8),
        nn.PReLU(8),
        nn.InstanceNorm2d(8, affine=True),
        nn.Mish(),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


class CosineHead(nn.Module):
    """Similarity to one direction for each class."""

    def __init__(self):
        super().__init__()
        self.body, self.classes = (
            nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten()),
            nn.Linear(128, CLASSES),
        )

    def forward(self, x):
        return F.linear(F.normalize(self.body(x)), F.normalize(self.classes.weight))


NETWORKS = {
    "a class token, products": lambda: ClassTokenTransformer(by_products),
    "a class token, sums of products": lambda: ClassTokenTransformer(by_einsum),
    "a class token, the function of PyTorch": lambda: ClassTokenTransformer(F.scaled_dot_product_attention),
    "the encoder of PyTorch": lambda: TorchTransformer(batch_first=True),
    "the encoder of PyTorch, tokens first": lambda: TorchTransformer(batch_first=False),
    "the attention of PyTorch": WeighedAttention,
    "shifted windows": ShiftedWindows,
    "norms of groups": normalised_by_groups,
    "a cosine": CosineHead,
}
