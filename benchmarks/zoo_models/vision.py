"""Image and audio models: ViT, ResNet-50, ConvNeXt and Whisper from configs, VGG-19 and a U-Net of our own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.zoo_models.case import Case, Output, Size, ZooModel, class_loss, smoothed_loss, tokens

SMALL_BATCH = 7


def _images(batch: int, side: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, side, side), tokens(classes, batch)


def vit(size: Size) -> Case:
    """ViT-B/16 on 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 80}
    small |= {"image_size": 16, "patch_size": 8}
    classes = 1000 if size == "real" else 5
    config = ViTConfig(**(small if size == "small" else {}), num_labels=classes)
    images, labels = _images(*((256, 224) if size == "real" else (SMALL_BATCH, 16)), classes)
    return Case(Output(ViTForImageClassification(config)), {"pixel_values": images}, smoothed_loss, labels)


def resnet50(size: Size) -> Case:
    """ResNet-50, batch norm in training mode."""
    from transformers import ResNetConfig, ResNetForImageClassification

    small = {"embedding_size": 6, "hidden_sizes": [8, 12], "depths": [1, 2], "layer_type": "bottleneck"}
    classes = 1000 if size == "real" else 5
    config = ResNetConfig(**(small if size == "small" else {}), num_labels=classes)
    images, labels = _images(*((256, 224) if size == "real" else (SMALL_BATCH, 20)), classes)
    return Case(Output(ResNetForImageClassification(config)), {"pixel_values": images}, class_loss, labels)


def convnext(size: Size) -> Case:
    """ConvNeXt-T: depthwise convolutions, layer norm over channels."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    small = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 2, 1]}
    classes = 1000 if size == "real" else 5
    config = ConvNextConfig(**(small if size == "small" else {}), num_labels=classes)
    images, labels = _images(*((256, 224) if size == "real" else (SMALL_BATCH, 32)), classes)
    return Case(Output(ConvNextForImageClassification(config)), {"pixel_values": images}, class_loss, labels)


class Vgg(nn.Module):
    """VGG (Simonyan and Zisserman 2014) with batch norm: 3 x 3 convolutions, then three linear layers."""

    def __init__(self, stages: list[tuple[int, int]], grid: int, hidden: int, classes: int, norm: bool = True) -> None:
        """``stages``: (convolutions, channels), each followed by a max pool; ``grid``: side of the last pooling."""
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for depth, width in stages:
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width, 3, padding=1), *([nn.BatchNorm2d(width)] if norm else [])]
                layers.append(nn.ReLU())
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(grid)
        self.classifier = nn.Sequential(
            nn.Linear(channels * grid * grid, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.pool(self.features(images)).flatten(1))


VGG19 = [(2, 64), (2, 128), (4, 256), (4, 512), (4, 512)]


def vgg19(size: Size) -> Case:
    """VGG-19 with batch norm on 224 x 224, dropout 0.5."""
    if size == "real":
        return Case(Vgg(VGG19, 7, 4096, 1000), *_in_order(128, 224, 1000))
    return Case(Vgg([(1, 6), (2, 8)], 2, 24, 5), *_in_order(SMALL_BATCH, 16, 5))


def _in_order(batch: int, side: int, classes: int) -> tuple[torch.Tensor, Callable[..., torch.Tensor], torch.Tensor]:
    images, labels = _images(batch, side, classes)
    return images, class_loss, labels


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015) with group norm, strided convolutions down and transposed ones up."""

    def __init__(self, channels: list[int], groups: int, classes: int) -> None:
        super().__init__()
        self.inward = _block(3, channels[0], groups)
        pairs = list(itertools.pairwise(channels))
        self.down = nn.ModuleList(nn.Conv2d(a, b, 2, stride=2) for a, b in pairs)
        self.left = nn.ModuleList(_block(b, b, groups) for _, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.right = nn.ModuleList(_block(2 * a, a, groups) for a, _ in reversed(pairs))
        self.outward = nn.Conv2d(channels[0], classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.inward(images)
        skipped = []
        for down, left in zip(self.down, self.left, strict=True):
            skipped.append(x)
            x = left(down(x))
        for up, right in zip(self.up, self.right, strict=True):
            x = right(torch.cat((up(x), skipped.pop()), 1))
        return self.outward(x)


def _block(channels: int, width: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.GroupNorm(groups, width),
        nn.SiLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.GroupNorm(groups, width),
        nn.SiLU(),
    )


def _pixel_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels, ignore_index=0)


def unet(size: Size) -> Case:
    """Segmentation of 256 x 256 images; class 0 is not counted."""
    if size == "real":
        model, batch, side, classes = UNet([64, 128, 256, 512, 1024], 32, 21), 32, 256, 21
    else:
        model, batch, side, classes = UNet([4, 6], 2, 5), SMALL_BATCH, 8, 5
    return Case(model, torch.randn(batch, 3, side, side), _pixel_loss, tokens(classes, batch, side, side))


def whisper(size: Size) -> Case:
    """Whisper small: convolutions over 30 s of mel bands, an encoder and a decoder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    if size == "real":
        shape = {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "vocab_size": 51865}
        shape |= {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
        shape |= {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
        batch, frames, length = 32, 3000, 224
    else:
        shape = {"d_model": 48, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 61, "num_mel_bins": 8}
        shape |= {"encoder_attention_heads": 6, "decoder_attention_heads": 6, "max_source_positions": 10}
        shape |= {"encoder_ffn_dim": 80, "decoder_ffn_dim": 80, "max_target_positions": 16}
        shape |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
        batch, frames, length = SMALL_BATCH, 20, 9
    model = Output(WhisperForConditionalGeneration(WhisperConfig(**shape)), use_cache=False)
    sound = torch.randn(batch, shape.get("num_mel_bins", 80), frames)
    ids, labels = tokens(shape["vocab_size"], batch, length), tokens(shape["vocab_size"], batch, length)
    return Case(model, {"input_features": sound, "decoder_input_ids": ids}, class_loss, labels)


MODELS = (
    ZooModel("vit", "ViT-B/16", vit),
    ZooModel("resnet50", "ResNet-50", resnet50),
    ZooModel("vgg19", "VGG-19 (batch norm)", vgg19),
    ZooModel("convnext", "ConvNeXt-T", convnext),
    ZooModel("unet", "U-Net", unet),
    ZooModel("whisper", "Whisper small", whisper),
)
