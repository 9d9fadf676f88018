"""Rotary settings of published configs: the `rope_scaling` and `rope_parameters` of transformers, read and written.

Two spellings of one thing: `rope_theta` beside `rope_scaling` (transformers 4), and `rope_parameters` (transformers 5),
flat or one dict per layer type. Whatever the spelling, YaRN applies to full-attention layers alone: that is OLMo-3
(transformers 5.2 applied it to all layers, a regression).
"""

import math
from collections.abc import Mapping
from typing import Any

from ncp_jax.convert.fields import Fields
from ncp_jax.nn.backbone import Backbone, Yarn

PLAIN_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
YARN_KEYS = PLAIN_KEYS | {
    "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate",
}  # fmt: skip
LAYER_TYPES = ("sliding_attention", "full_attention")


def read_rope(
    fields: Fields, theta_names: tuple[str, ...] = ("rope_theta",), default: float | None = None
) -> tuple[float, Yarn | None]:
    """(theta, YaRN of the full-attention layers). `default`: theta where none is given. Problems go to `fields`."""
    thetas: dict[str, float] = {}
    yarns: dict[str, Yarn | None] = {}
    top = fields.number(*theta_names, default=None)
    if top is not None:
        thetas[theta_names[0]] = top
    for name, settings in _dicts(fields).items():
        theta, yarn = _read(fields, name, settings)
        if theta is not None:
            thetas[name] = theta
        if name.endswith(".sliding_attention"):
            if yarn is not None:
                fields.wrong(name, settings, "asks for YaRN, which OLMo-3 applies to full-attention layers alone")
        else:
            yarns[name] = yarn
    if not thetas and default is not None:
        return default, next(iter(yarns.values()), None)
    if not thetas:
        fields.problems.append(f"{theta_names[0]} is missing; there is no default for it")
    if len(set(thetas.values())) > 1:
        fields.wrong(" and ".join(thetas), list(thetas.values()), "must be one base for all layers")
    if len(set(yarns.values())) > 1:
        fields.wrong(" and ".join(yarns), list(yarns.values()), "must say the same in both spellings")
    return next(iter(thetas.values()), 1.0), next(iter(yarns.values()), None)


def yarn_scale(factor: float, weight: float) -> float:
    """0.1 a ln f + 1: the attention factor of YaRN (arXiv 2309.00071 Eq. 22), weighted."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float | None:
    """Attention factor of the two mscale fields; None where it is YaRN's own, which is the default."""
    if not mscale or not mscale_all_dim:
        return None
    value = yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return None if value == yarn_scale(factor, 1.0) else value


def write_rope(s: Backbone) -> dict[str, Any]:
    """The fields in both spellings, nothing left to a default."""
    plain = {"rope_type": "default", "rope_theta": s.rope_theta}
    y = s.yarn
    if y is None:
        return {
            "rope_theta": s.rope_theta, "rope_scaling": None, "rope_parameters": dict.fromkeys(LAYER_TYPES, plain)
        }  # fmt: skip
    yarn = {
        "rope_type": "yarn", "factor": y.factor, "original_max_position_embeddings": y.original_length,
        "attention_factor": yarn_scale(y.factor, 1.0) if y.attention_factor is None else y.attention_factor,
        "beta_fast": y.beta_fast, "beta_slow": y.beta_slow,
    }  # fmt: skip
    per_type = {"sliding_attention": plain, "full_attention": {**yarn, "rope_theta": s.rope_theta}}
    return {"rope_theta": s.rope_theta, "rope_scaling": yarn, "rope_parameters": per_type}


def _dicts(fields: Fields) -> dict[str, Mapping[str, Any]]:
    """Every rotary dict there is, by the path to it."""
    found: dict[str, Any] = {"rope_scaling": fields.raw("rope_scaling", default=None)}
    parameters = fields.raw("rope_parameters", default=None)
    if isinstance(parameters, dict) and any(isinstance(value, dict) for value in parameters.values()):
        found |= {f"rope_parameters.{kind}": settings for kind, settings in parameters.items()}
        for kind in parameters.keys() - set(LAYER_TYPES):
            fields.wrong(f"rope_parameters.{kind}", parameters[kind], f"must be under {' or '.join(LAYER_TYPES)}")
    else:
        found["rope_parameters"] = parameters
    dicts: dict[str, Mapping[str, Any]] = {}
    for name, settings in found.items():
        if isinstance(settings, dict):
            dicts[name] = settings
        elif settings is not None:
            fields.wrong(name, settings, "must be an object or null")
    return dicts


def _read(fields: Fields, name: str, settings: Mapping[str, Any]) -> tuple[float | None, Yarn | None]:
    """(theta or None, YaRN or None) of one dict."""
    inner = Fields(settings, name)
    kind = inner.choice("rope_type", "type", known={"default": "default", "yarn": "yarn"})
    theta = inner.number("rope_theta", default=None)
    inner.exactly({"partial_rotary_factor": 1.0}, required=False)
    yarn = _read_yarn(inner) if kind == "yarn" else None
    for key in settings.keys() - (YARN_KEYS if kind == "yarn" else PLAIN_KEYS):
        inner.wrong(key, settings[key], f"is not a field of rope_type {kind!r}")
    fields.problems += [f"{name}: {problem}" for problem in inner.problems]
    return theta, None if inner.problems else yarn


def _read_yarn(inner: Fields) -> Yarn:
    factor = inner.number("factor")
    if factor < 1:
        inner.wrong("factor", factor, "must be at least 1")
    explicit = inner.number("attention_factor", default=None)
    mscale, all_dim = (inner.number(name, default=None, above=-math.inf) for name in ("mscale", "mscale_all_dim"))
    implied = attention_factor(factor, mscale, all_dim)
    scale = implied if explicit is None else explicit
    return Yarn(
        factor=factor,
        original_length=inner.integer("original_max_position_embeddings"),
        beta_fast=inner.number("beta_fast", default=32.0),
        beta_slow=inner.number("beta_slow", default=1.0),
        attention_factor=None if scale == yarn_scale(factor, 1.0) else scale,
        round_to_int=inner.choice("truncate", known={True: True, False: False}, default=True),
    )
