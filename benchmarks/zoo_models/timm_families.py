"""The smallest model of every module of timm 1.0.31 that has one of up to 35 million parameters: 86 kinds of vision
models, at the smallest images that they stand.

``pip install --no-deps timm==1.0.31 torchvision==0.28.0`` beside HAP's own dependencies. torchvision's wheels are built
for CUDA; timm imports it for its data sets, and none of its compiled operators are called, so where they cannot be
loaded it is enough that they are declared.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from benchmarks.zoo_models.case import Case, Float64, class_loss
from benchmarks.zoo_models.families import BATCH, CLASSES, NotBuilt

SIDES = (64, 96, 128, 160, 224, 256)
_NAMES = """
adv_inception_v3 cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 cpubone_nano crossvit_tiny_240
cs3darknet_focus_s csatv2 cspnext_tiny davit_tiny deit_tiny_patch16_224 densenet121 dla46x_c dpn48b edgenext_xx_small
efficientformer_l1 efficientformerv2_s0 efficientvim_m1 efficientvit_b0 efficientvit_m0 ese_vovnet19b_slim_dw
fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny ghostnet_050 gmlp_ti16_224 halonet_h1 hardcorenas_b hgnetv2_b0
hiera_tiny_224 hrnet_w18_small iformer_t inception_next_atto jx_nest_tiny lcnet_035 lcnetv2_small legacy_seresnet18
legacy_xception levit_128s lowformer_b0 mobilevit_xxs mvitv2_tiny nextvit_small pit_ti_224 poolformerv2_s12 pvt_v2_b0
rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2next50 resnest14d resnetv2_18 rexnet_100 sam2_hiera_tiny
selecsls42 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224
swinv2_cr_tiny_224 swinv2_tiny_window16_256 test_byobnet test_coatnet test_convnext test_efficientnet test_mambaout
test_nfnet test_resnet test_vit test_vit_relpos tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small
visformer_tiny vit_tiny_patch16_dinov3_qkvb vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xception41p
xcit_nano_12_p8_224
"""
MODELS = tuple(_NAMES.split())
_DECLARED: list[torch.library.Library] = []


class Wide(nn.Module):
    """Runs in float64 throughout."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Float64():
            found: torch.Tensor = self.model(x)
        return found


def build(name: str) -> Case:
    """In float64, with one global batch. NotBuilt, with the reason, where there is none."""
    timm, why = _timm(), ""
    for side in SIDES:
        try:
            return _of_side(timm, name, side)
        except Exception as e:  # of whatever kind: it does not stand images of that size
            why = why or f"{type(e).__name__}: {next(iter(str(e).strip().splitlines()), '')}"
    raise NotBuilt(why)


def _of_side(timm: Any, name: str, side: int) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = timm.create_model(name, num_classes=CLASSES, img_size=side)
        except TypeError:  # it takes images of any size
            model = timm.create_model(name, num_classes=CLASSES)
        model = Wide(model.double().train())
        pixels = torch.randn(BATCH, 3, side, side, dtype=torch.float64)
        labels = torch.randint(0, CLASSES, (BATCH,))
    with torch.no_grad():
        made = model(pixels)
    if not isinstance(made, torch.Tensor) or not torch.isfinite(made).all():
        raise ValueError("its output is not one finite tensor")
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # as in ``families``
            module.p = 0.0
    return Case(model, {"x": pixels}, class_loss, labels)


def _timm() -> Any:
    if not _DECLARED:
        with contextlib.suppress(RuntimeError):  # they are there already
            _DECLARED.append(torch.library.Library("torchvision", "FRAGMENT"))
            _DECLARED[0].define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _DECLARED[0].define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        import timm
    except ImportError as e:
        raise SystemExit(f"timm is not installed, or its torchvision is not ({e}): {__doc__}") from e
    return timm
