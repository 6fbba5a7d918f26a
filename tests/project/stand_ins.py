"""Stand-ins for packages that can not be installed everywhere: their interface."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor, nn


class _Block(nn.Module):
    """A block of a ResNet, with torchvision's names."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        smaller = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = None if inputs == outputs else nn.Sequential(*smaller)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        activated: Tensor = self.relu(out)
        return activated


class _ResNet(nn.Module):
    """A ResNet18, with torchvision's names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(_Block(64, 64), _Block(64, 64))
        self.layer2 = nn.Sequential(_Block(64, 128), _Block(128, 128))
        self.layer3 = nn.Sequential(_Block(128, 256), _Block(256, 256))
        self.layer4 = nn.Sequential(_Block(256, 512), _Block(512, 512))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores


def torchvision() -> dict[str, ModuleType]:
    """Return modules that hold what a page needs of torchvision."""
    package, models = ModuleType("torchvision"), ModuleType("torchvision.models")
    vars(models)["resnet18"] = lambda weights=None: _ResNet()
    vars(package)["models"] = models
    return {"torchvision": package, "torchvision.models": models}
