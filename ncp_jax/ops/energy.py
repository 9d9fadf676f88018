"""The energy score: distances between samples of a model and draws of a target, as an unbiased estimate.

S(P, y) = E|x - x'|^b - 2 E|x - y|^b with x, x' ~ P independent; strictly proper for 0 < b < 2 (at 2 it knows means
alone). The loss is -S. Source: CALM, arXiv 2510.27688, Eq. 8-10.

Shapes: N samples of the model, M draws of the target, P any axes of positions, l latent size. Distances and sums in
at least f32. A distance of zero has gradient zero: the derivative of |d|^b at 0 does not exist for b <= 1, and a head
whose last layer starts at zero makes all N samples equal.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

# A TPU multiplies float32 in bf16 unless told otherwise. Rounding of 0.2 % would drown what is left of two halves that
# nearly cancel.
EXACT = lax.Precision.HIGHEST


class Energy(NamedTuple):
    """The two halves of the loss at each position [P]; `loss` is the negative energy score."""

    fidelity: Array  # 2 E|x - y|^b
    diversity: Array  # E|x - x'|^b over different samples

    @property
    def loss(self) -> Array:
        return self.fidelity - self.diversity


def check_exponent(beta: float) -> float:
    """beta itself if the energy score is proper for it. Raises ValueError."""
    if not 0 < beta <= 2:
        raise ValueError(
            f"the energy score's exponent beta is {beta}; it must lie in (0, 2]: 1 is the usual choice, and 2 scores "
            "means alone"
        )
    return beta


def distance(a: Array, b: Array, beta: float) -> Array:
    """|a - b|^beta over the last axis; zero where a = b, with zero gradient."""
    wide = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    return _power(((a.astype(wide) - b.astype(wide)) ** 2).sum(axis=-1), beta / 2)


def energy(x_NPl: Array, mean_Pl: Array, std_Pl: Array, noise: Array, draws: int, beta: float) -> Energy:
    """The energy of N samples against `draws` draws y = mean + std * normal of the target.

    Args:
        noise: random keys, one per entry of the first position axis, from which every draw gets its own; or recorded
            normals [draws, P, l].
    The target has no gradient. Memory does not grow with `draws`: they are made, used and dropped a few at a time.
    """
    wide = jnp.promote_types(x_NPl.dtype, jnp.float32)
    x_NPl, mean_Pl, std_Pl = (a.astype(wide) for a in (x_NPl, mean_Pl, std_Pl))
    to_target_P = _to_target(
        x_NPl, lax.stop_gradient(mean_Pl), lax.stop_gradient(std_Pl), jnp.asarray(noise), draws, beta
    )
    return Energy(2 * to_target_P, between_samples(x_NPl, beta))


def between_samples(x_NPl: Array, beta: float) -> Array:
    """Mean of |x_n - x_k|^beta over the N (N - 1) ordered pairs n != k, [P]. The diagonal is never formed."""
    N = x_NPl.shape[0]
    if N < 2:
        raise ValueError(f"the energy score compares samples with one another: it needs at least 2, got {N}")

    @partial(jax.checkpoint, static_argnums=1)  # keeps the samples alone, not one difference per shift
    def ring(x_NPl: Array, shift: int) -> Array:
        return distance(x_NPl, jnp.roll(x_NPl, shift, axis=0), beta).sum(axis=0)

    # A shift and its opposite hold the same pairs.
    parts = [ring(x_NPl, s) * (1 if 2 * s == N else 2) for s in range(1, N // 2 + 1)]
    return sum(parts[1:], parts[0]) / (N * (N - 1))


def over_points(p_N: Array, points_NW: Array, target_W: Array, beta: float) -> Energy:
    """The exact energy of a distribution on N points: 2 sum_n p_n |e_n - c|^b and sum_nm p_n p_m |e_n - e_m|^b.

    Under `vmap` over positions that share their points, the distances between points are made once: a position costs
    N distances to its target and one product with them, 2 N^2 FLOPs. Compiled, neither value nor gradient holds N^2 or
    N W numbers per position.
    """
    wide = jnp.promote_types(jnp.result_type(p_N, points_NW, target_W), jnp.float32)
    p_N, points_NW, target_W = (a.astype(wide) for a in (p_N, points_NW, target_W))
    pair_NN = jax.vmap(lambda point_W: _from_points(points_NW, point_W, beta))(points_NW)
    met_N = jnp.matmul(p_N, pair_NN, precision=EXACT)
    return Energy(2 * (p_N * _from_points(points_NW, target_W, beta)).sum(), (p_N * met_N).sum())


# The derivative of a squared difference would hold N W numbers per position; as products it does not. Its relative
# error grows as |e| / |e - c| times the rounding of a product, which a point that is nearly met can bear.
@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _from_points(points_NW: Array, target_W: Array, beta: float) -> Array:
    """|e_n - c|^beta, [N]. The value never expands the square, which would cancel where points lie close together."""
    return distance(points_NW, target_W, beta)


@_from_points.defjvp
def _from_points_jvp(beta: float, primals, tangents):
    (points_NW, target_W), (dot_NW, dot_W) = primals, tangents
    product = partial(jnp.matmul, precision=EXACT)
    square_N = distance(points_NW, target_W, 2.0)
    # (e - c) . (de - dc)
    along_N = (points_NW * dot_NW).sum(axis=-1) - product(dot_NW, target_W) - product(points_NW, dot_W)
    pull_N = beta * _power(square_N, beta / 2 - 1)  # d|g|^b = b |g|^(b-2) g . dg
    return _power(square_N, beta / 2), pull_N * (along_N + (target_W * dot_W).sum())


# A forward pass makes each draw once and forgets it, so its derivative is taken on the way: the gradient has the shape
# of x, while keeping draws or differences would cost N * M * l per position.
@partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _to_target(x_NPl: Array, mean_Pl: Array, std_Pl: Array, noise: Array, draws: int, beta: float) -> Array:
    """Mean of |x_n - y_m|^beta over samples and draws, [P]."""

    def add(total_P: Array, index_m: Array) -> tuple[Array, None]:
        y_mPl = _targets(mean_Pl, std_Pl, noise, index_m)
        return total_P + distance(x_NPl[:, None], y_mPl, beta).sum(axis=(0, 1)), None

    zero_P = jnp.zeros(x_NPl.shape[1:-1], x_NPl.dtype)
    return lax.scan(add, zero_P, _slices(draws))[0] / (len(x_NPl) * draws)


@_to_target.defjvp
def _to_target_jvp(draws: int, beta: float, primals, tangents):
    x_NPl, mean_Pl, std_Pl, noise = primals

    def add(total: tuple[Array, Array], index_m: Array) -> tuple[tuple[Array, Array], None]:
        y_mPl = _targets(mean_Pl, std_Pl, noise, index_m)
        value_P, pull_NPl = total
        for y_Pl in y_mPl:  # written out: one pass adds all of them to the gradient
            gap_NPl = x_NPl - y_Pl
            square_NP = (gap_NPl**2).sum(axis=-1)
            value_P = value_P + _power(square_NP, beta / 2).sum(axis=0)
            # d|g|^b / dg = b |g|^(b-2) g
            pull_NPl = pull_NPl + beta * _power(square_NP, beta / 2 - 1)[..., None] * gap_NPl
        return (value_P, pull_NPl), None

    zero = jnp.zeros(x_NPl.shape[1:-1], x_NPl.dtype), jnp.zeros_like(x_NPl)
    value_P, gradient_NPl = jax.tree.map(lambda a: a / (len(x_NPl) * draws), lax.scan(add, zero, _slices(draws))[0])
    return value_P, (gradient_NPl * tangents[0]).sum(axis=(0, -1))


def _slices(draws: int) -> Array:
    """Numbers of the draws, a few per row: more at once use the machine better, and cost N * l memory each."""
    together = next(size for size in (4, 3, 2, 1) if draws % size == 0)
    return jnp.arange(draws).reshape(-1, together)


def _targets(mean_Pl: Array, std_Pl: Array, noise: Array, index_m: Array) -> Array:
    """Draws number `index_m` of the target, [m, P, l]. A draw's noise depends on its key and number alone."""
    if not jnp.issubdtype(noise.dtype, jax.dtypes.prng_key):
        return mean_Pl + noise[index_m] * std_Pl

    def draw(key: Array, index: Array) -> Array:
        return jax.random.normal(jax.random.fold_in(key, index), mean_Pl.shape[1:], mean_Pl.dtype)

    rows = jax.vmap(draw, in_axes=(0, None))
    return mean_Pl + jax.vmap(rows, in_axes=(None, 0))(noise, index_m) * std_Pl


def _power(square: Array, exponent: float) -> Array:
    """square^exponent, and 0 with gradient 0 where the square is 0."""
    positive = square > 0
    return jnp.where(positive, jnp.where(positive, square, 1) ** exponent, 0)
