"""Small members of the families of image classifiers that libraries of models have, written as those write them.

All take images (n, 3, 32, 32) to ten logits.
"""

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 10


def convolution(inputs, outputs, kernel=3, stride=1, groups=1, activation=nn.ReLU):
    """A convolution without bias, batch normalisation and an activation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        activation(),
    )


def head(features):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(features, CLASSES))


def alexnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d((7, 7)),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(588, 16),
        nn.ReLU(inplace=True),
        nn.Linear(16, CLASSES),
    )


def vgg():
    stages = [
        layer for pair in ((3, 6), (6, 8), (8, 8)) for layer in (*convolution(*pair), nn.MaxPool2d(2, 2))
    ]
    return nn.Sequential(*stages, nn.Flatten(), nn.Linear(128, 16), nn.ReLU(True), nn.Linear(16, CLASSES))


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride, groups=1):
        super().__init__()
        self.first = convolution(inputs, outputs, stride=stride)
        self.second = nn.Sequential(
            nn.Conv2d(outputs, outputs, 3, padding=1, groups=groups), nn.BatchNorm2d(outputs)
        )
        plain = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if plain else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.second(self.first(x))
        out += self.shortcut(x)
        return self.relu(out)


def resnet(groups=1):
    blocks = [BasicBlock(6, 6, 1, groups), BasicBlock(6, 8, 2, 2 * groups)]
    return nn.Sequential(convolution(3, 6, stride=2), nn.MaxPool2d(3, 2, 1), *blocks, head(8))


def resnext():
    return resnet(groups=2)


class DenseLayer(nn.Module):
    def __init__(self, inputs, growth):
        super().__init__()
        self.norm, self.convolution = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, growth, 3, padding=1)

    def forward(self, features):
        return self.convolution(F.relu(self.norm(torch.cat(features, 1))))


class DenseBlock(nn.Module):
    def __init__(self, inputs, growth, layers):
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + place * growth, growth) for place in range(layers))

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.block = DenseBlock(6, 3, 3)
        self.transition = nn.Sequential(
            nn.BatchNorm2d(15), nn.ReLU(), nn.Conv2d(15, 8, 1), nn.AvgPool2d(2, 2)
        )
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, x):
        features = F.relu(self.transition(self.block(self.stem(x))), inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(features, (1, 1)), 1))


class Fire(nn.Module):
    def __init__(self, inputs, squeeze, expand):
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.narrow, self.wide = nn.Conv2d(squeeze, expand, 1), nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.narrow(x)), F.relu(self.wide(x))], 1)


def squeezenet():
    """Ends with a convolution and a pooling, not with a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Fire(8, 4, 6),
        nn.Dropout(),
        nn.Conv2d(12, CLASSES, 1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
    )


class Inception(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.branches = nn.ModuleList(
            [
                convolution(inputs, 4, 1),
                nn.Sequential(convolution(inputs, 3, 1), convolution(3, 4, 3)),
                nn.Sequential(convolution(inputs, 2, 1), convolution(2, 3, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), convolution(inputs, 3, 1)),
            ]
        )

    def forward(self, x):
        return torch.cat([branch(x) for branch in self.branches], 1)


def googlenet():
    return nn.Sequential(
        convolution(3, 6, 5, 2), nn.MaxPool2d(3, 2, 1), Inception(6), Inception(14), head(14)
    )


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, stride, activation=nn.ReLU6, scale=None):
        super().__init__()
        hidden = 2 * inputs
        layers = [convolution(inputs, hidden, 1, activation=activation)]
        layers += [convolution(hidden, hidden, 3, stride, groups=hidden, activation=activation)]
        layers += [] if scale is None else [scale(hidden)]
        layers += [nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.layers, self.is_residual = nn.Sequential(*layers), stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.layers(x) if self.is_residual else self.layers(x)


def mobilenet_v2():
    blocks = [InvertedResidual(6, 6, 1), InvertedResidual(6, 8, 2)]
    return nn.Sequential(convolution(3, 6, 3, 2, activation=nn.ReLU6), *blocks, head(8))


class SqueezeExcitation(nn.Module):
    """As torchvision has it; `sigmoid` is hard in MobileNetV3."""

    def __init__(self, channels, activation=nn.SiLU, sigmoid=nn.Sigmoid):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)
        self.activation, self.scale_activation = activation(), sigmoid()

    def forward(self, x):
        scale = self.fc2(self.activation(self.fc1(self.avgpool(x))))
        return self.scale_activation(scale) * x


def mobilenet_v3():
    def scale(channels):
        return SqueezeExcitation(channels, nn.ReLU, nn.Hardsigmoid)

    blocks = [InvertedResidual(6, 6, 1, nn.Hardswish, scale), InvertedResidual(6, 8, 2, nn.Hardswish, scale)]
    return nn.Sequential(convolution(3, 6, 3, 2, activation=nn.Hardswish), *blocks, head(8))


def efficientnet():
    blocks = [InvertedResidual(6, 6, 1, nn.SiLU, SqueezeExcitation), InvertedResidual(6, 8, 2, nn.SiLU)]
    return nn.Sequential(convolution(3, 6, 3, 2, activation=nn.SiLU), *blocks, head(8))


class SEBlock(nn.Module):
    """As the first implementations of SENet had it, by views of asked sizes."""

    def __init__(self, channels):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(nn.Linear(channels, 4), nn.ReLU(), nn.Linear(4, channels), nn.Sigmoid())

    def forward(self, x):
        batch, channels, _, _ = x.size()
        scale = self.fc(self.pool(x).view(batch, channels)).view(batch, channels, 1, 1)
        return x * scale.expand_as(x)


def senet():
    return nn.Sequential(convolution(3, 6, 3, 2), SEBlock(6), BasicBlock(6, 8, 2), SEBlock(8), head(8))


class ShuffleUnit(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.branch = convolution(channels // 2, channels // 2)

    def forward(self, x):
        kept, changed = x.chunk(2, dim=1)
        out = torch.cat((kept, self.branch(changed)), dim=1)
        batch, channels, height, width = out.size()
        return (
            out.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, -1, height, width)
        )


def shufflenet():
    return nn.Sequential(convolution(3, 8, 3, 2), ShuffleUnit(8), head(8))


class ShuffledGroups(nn.Module):
    """ShuffleNet's first version: grouped convolutions, whose channels are shuffled."""

    def __init__(self, channels, groups):
        super().__init__()
        self.groups = groups
        self.first = convolution(channels, channels, 1, groups=groups)
        self.second = convolution(channels, channels, 3, groups=channels, activation=nn.Identity)

    def forward(self, x):
        out = self.first(x)
        batch, channels, height, width = out.shape
        torch._assert(channels % self.groups == 0, "groups must divide the channels")
        out = (
            out.view(batch, self.groups, channels // self.groups, height, width).transpose(1, 2).contiguous()
        )
        return F.relu(x + self.second(out.view(batch, channels, height, width)))


def shufflenet_v1():
    return nn.Sequential(convolution(3, 6, 3, 2), ShuffledGroups(6, 2), head(6))


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.depthwise, self.norm = (
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            nn.LayerNorm(channels),
        )
        self.mlp = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
        )

    def forward(self, x):
        return x + self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def convnext():
    return nn.Sequential(nn.Conv2d(3, 6, 4, 4), ConvNeXtBlock(6), head(6))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        query, key, value = self.qkv(x).reshape(batch, tokens, 3, width).permute(2, 0, 1, 3).unbind(0)
        return self.out((query @ key.transpose(-2, -1)).softmax(dim=-1) @ value)


class VisionTransformer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed, self.norm, self.attention = (
            nn.Conv2d(3, width, 8, 8),
            nn.LayerNorm(width),
            Attention(width),
        )
        self.head = nn.Linear(16 * width, CLASSES)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        return self.head((tokens + self.attention(self.norm(tokens))).flatten(1))


class SegmentingClassifier(nn.Module):
    """Down and up again, with a skip by concatenation, as U-Nets are."""

    def __init__(self):
        super().__init__()
        self.down, self.middle = convolution(3, 4, 3, 2), convolution(4, 6, 3, 2)
        self.up, self.last = nn.ConvTranspose2d(6, 4, 2, 2), convolution(8, 6)
        self.head = head(6)

    def forward(self, x):
        fine = self.down(x)
        return self.head(self.last(torch.cat([fine, self.up(self.middle(fine))], 1)))


FAMILIES = {
    "AlexNet": alexnet,
    "VGG": vgg,
    "ResNet": resnet,
    "ResNeXt": resnext,
    "DenseNet": DenseNet,
    "GoogLeNet": googlenet,
    "MobileNetV2": mobilenet_v2,
    "SqueezeNet": squeezenet,
    "SENet": senet,
    "MobileNetV3": mobilenet_v3,
    "EfficientNet": efficientnet,
    "ShuffleNet": shufflenet_v1,
    "U-Net": SegmentingClassifier,
    "ShuffleNetV2": shufflenet,
    "ConvNeXt": convnext,
    "ViT": VisionTransformer,
}
