"""The table of optimizers: by class, the role of each state, and how far an error in a state moves a weight.

A lossy mode may round a state only in the unit in which the optimizer uses it, so the optimizer's own update decides,
and never the name of a state. Prodigy scales its `exp_avg` by an estimated rate, and ADOPT divides gradients before it
averages them; both name their states as Adam does.

Below, e is the bound of a state's error in the unit of its role, and u the part of a step that the exact state would
have made, before weight decay. b1, b2 and so on are the optimizer's betas, t is the step that is about to be done.

| role | unit of the error e | the state |
|---|---|---|
| exp_avg | the root of the state's square, or its norm | a mean of gradients that is divided by that |
| momentum | the root mean square of its row | a mean that is divided by nothing of its own size |
| exp_avg_sq | log2 | a mean of squares, by whose root gradients are divided |
| maximum | log2 | the largest `exp_avg_sq` so far, which takes its place |
| sum | log2 | a sum of squares, by whose root gradients are divided |
| norm | log2 | a size of gradients, which divides them as it is |
| factor | | rows and columns that predict squares, and the squares of vectors; exact, because they take no space |
| iterate | | other weights, such as averaged ones; exact |

An error in a square makes a divisor wrong by a factor of at most 2**(e / 2), and one in a norm by at most 2**e. It is
less, because the next gradient adds a part without an error. So u changes by at most D = |u| (2**(e / 2) - 1). An error
in `exp_avg` adds A lr, and A of Adam is e b1 / (1 - b1**t) * sqrt((1 - b2**t) / b2).

In the table, lr, momentum, nesterov and alpha are settings of the optimizer, g is the gradient, and rms is the root
mean square of a momentum's row. A' is A without the division by b2, because a maximum never shrinks. RAdam multiplies
its steps by a rectification r; in its first steps it divides by nothing. NAdam's mu' is the momentum of the step after
this one, and its product is that of the momenta of all steps up to mu'. Prodigy's d is the rate that it estimates.
Muon's X is the matrix that it makes orthogonal in five iterations, a is the first of their coefficients, and lr' is lr
times the root of rows / columns if that exceeds 1. AdEMAMix's divisor is sqrt(exp_avg_sq / (1 - b2**t)) + eps.

| optimizer | an error in these states | moves a weight in one step by at most |
|---|---|---|
| Adam, AdamW, FusedAdam, DeepSpeedCPUAdam, SparseAdam, Adam of bitsandbytes | exp_avg, exp_avg_sq | A lr + D |
| the same with amsgrad, exp_avg in the unit of its maximum | all three | A' lr + D; e of D is the larger |
| RAdam | exp_avg, exp_avg_sq | A lr r + D; in the first steps e lr b1 / (1 - b1**t) sqrt(exp_avg_sq) |
| NAdam | exp_avg, exp_avg_sq | A lr + D, A = e b1 mu' / (1 - product) * sqrt((1 - b2**t) / b2) |
| Prodigy | exp_avg, exp_avg_sq | d lr e b1 / sqrt(b2) + D |
| Adamax | exp_avg, exp_inf | e lr b1 / (b2 (1 - b1**t)) + abs(u) (2**e - 1) |
| RMSprop | square_avg, momentum_buffer | D + e lr momentum rms |
| Adagrad, Adadelta | sum; square_avg, acc_delta | D; both together: e of D is the sum of both |
| schedule-free AdamW and RAdam | exp_avg_sq | D |
| SGD, SGD of bitsandbytes | momentum_buffer | e lr momentum rms, with nesterov once more times momentum |
| Muon | momentum_buffer | in Frobenius' norm lr' a**5 times the change of X / norm(X) |
| Lion, Lion of bitsandbytes | exp_avg | 2 lr where abs(b1 exp_avg + (1 - b1) g) <= b1 e rms, elsewhere nothing |
| ADOPT | exp_avg, exp_avg_sq | e lr b1 rms + (1 - b1) D |
| AdEMAMix | exp_avg, exp_avg_slow, exp_avg_sq | A lr + D + e lr alpha b3 rms / the divisor |
| Adafactor | exp_avg | e b1 rms |

`tests/checkpoint/planning/test_update_rules.py` takes a real step of each optimizer from exact and from decoded states
and holds it against these lines. Their sources are the papers of the optimizers (Kingma and Ba 2014; Reddi et al. 2018;
Liu et al. 2019; Dozat 2016; Mishchenko and Defazio 2023; Tieleman and Hinton 2012; Duchi et al. 2011; Zeiler 2012;
Defazio et al. 2024; Jordan et al. 2024; Chen et al. 2023; Taniguchi et al. 2024; Pagliardini et al. 2024; Shazeer and
Stern 2018) and the `step` methods of the classes below.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, ROLES, SQUARES
from hf_trainweights.errors import ConfigError

OPTIMIZER_ROLES = tuple(role for role in ROLES if role not in ("weight", "buffer"))
"""The roles of an optimizer's states."""


@dataclass(frozen=True)
class StateRole:
    """The role of an optimizer's state.

    Args:
        role: One of `OPTIMIZER_ROLES`; `hf_trainweights.checkpoint.planning.update_rules` explains them.
        square: For `exp_avg`, the key of the state by whose root it is divided, or of the norm.

    Raises:
        ConfigError: The role is unknown, or it is `exp_avg` and there is no square.
    """

    role: str
    square: str | None = None

    def __post_init__(self) -> None:
        if self.role not in OPTIMIZER_ROLES:
            raise ConfigError("StateRole, role", f"one of {', '.join(OPTIMIZER_ROLES)}", repr(self.role), "Choose one.")
        if (self.role == "exp_avg") != (self.square is not None):
            next_step = "A mean that is divided by nothing has the role momentum."
            raise ConfigError(
                "StateRole, square", "a key for exp_avg, and none elsewhere", repr(self.square), next_step
            )


_EXACT = StateRole("other")


@dataclass(frozen=True)
class UpdateRule:
    """How a class of optimizers moves a weight: the role of each state that a parameter has.

    If a parameter has any other state, or lacks one, the optimizer moves it by another rule.

    Args:
        states: The states by their keys. A lossy mode rounds those whose role it rounds.
        exact: Keys of further states, which stay exact, such as step counters.

    Raises:
        ConfigError: The square of a state is not itself one that is divided by.
    """

    states: Mapping[str, StateRole]
    exact: Collection[str] = ()

    def __post_init__(self) -> None:
        for key, state in self.states.items():
            square = self.states.get(state.square or "")
            if state.square is not None and (square is None or square.role not in SQUARES):
                expected = f"the key of a state whose role is one of {', '.join(SQUARES)}"
                next_step = "Name the state that the optimizer divides by."
                raise ConfigError(f"UpdateRule, square of {key}", expected, repr(state.square), next_step)

    def fits(self, states: Mapping[Any, Any]) -> bool:
        """Return whether a parameter has the states of this rule, in dtypes that codecs can round."""
        tensors = {key: states.get(key) for key in self.states}
        if not all(isinstance(tensor, Tensor) and tensor.dtype in LOSSY_DTYPES for tensor in tensors.values()):
            return False
        shapes = {key: tensor.shape for key, tensor in tensors.items() if isinstance(tensor, Tensor)}
        are_alike = all(shapes[key] == shapes[state.square or key] for key, state in self.states.items())
        return are_alike and states.keys() <= self.states.keys() | {*self.exact}

    def is_norm(self, key: str) -> bool:
        """Return whether the state is a first moment that is divided by a norm and not by a root."""
        square = self.states.get(state_of(self, key).square or "")
        return square is not None and square.role == "norm"


Rules = tuple[UpdateRule, ...]

_MEAN, _SQUARE, _MOMENTUM = StateRole("exp_avg", "exp_avg_sq"), StateRole("exp_avg_sq"), StateRole("momentum")
_MOMENTS = {"exp_avg": _MEAN, "exp_avg_sq": _SQUARE}
_BUFFER = UpdateRule({"momentum_buffer": _MOMENTUM})
_FACTORS = {"exp_avg_sq_row": StateRole("factor"), "exp_avg_sq_col": StateRole("factor")}
_OF_SCHEDULE_FREE = UpdateRule({"z": StateRole("iterate"), "exp_avg_sq": _SQUARE})

ADAM = "torch.optim.adam.Adam"
# If states of Adam and AdamW are AMSGrad's, the update divides by the root of the maximum.
ADAM_RULES: Rules = (
    UpdateRule(_MOMENTS, {"step"}),
    UpdateRule(
        {
            "exp_avg": StateRole("exp_avg", "max_exp_avg_sq"),
            "exp_avg_sq": _SQUARE,
            "max_exp_avg_sq": StateRole("maximum"),
        },
        {"step"},
    ),
)
# The 32-bit states of bitsandbytes. Its 8-bit states are integers, so they stay exact.
_ADAM_OF_BITSANDBYTES = UpdateRule({"state1": StateRole("exp_avg", "state2"), "state2": _SQUARE}, {"step"})
_MOMENTUM_OF_BITSANDBYTES = UpdateRule({"state1": _MOMENTUM}, {"step"})

RULES: dict[str, Rules] = {
    ADAM: ADAM_RULES,
    "torch.optim.adamw.AdamW": ADAM_RULES,
    # apex counts steps in the group, and has no state `step`.
    "apex.optimizers.fused_adam.FusedAdam": ADAM_RULES,
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": ADAM_RULES,
    "deepspeed.ops.adam.fused_adam.FusedAdam": ADAM_RULES,
    "torch.optim.sparse_adam.SparseAdam": (UpdateRule(_MOMENTS, {"step"}),),
    "torch.optim.radam.RAdam": (UpdateRule(_MOMENTS, {"step"}),),
    "torch.optim.nadam.NAdam": (UpdateRule(_MOMENTS, {"step", "mu_product"}),),
    "torch.optim.adamax.Adamax": (
        UpdateRule({"exp_avg": StateRole("exp_avg", "exp_inf"), "exp_inf": StateRole("norm")}, {"step"}),
    ),
    # The difference of two rounded states, by which a centered RMSprop divides, could become negative.
    "torch.optim.rmsprop.RMSprop": (
        UpdateRule({"square_avg": _SQUARE}, {"step"}),
        UpdateRule({"square_avg": _SQUARE, "momentum_buffer": _MOMENTUM}, {"step"}),
        UpdateRule({"momentum_buffer": _MOMENTUM}, {"step", "square_avg", "grad_avg"}),
    ),
    "torch.optim.adagrad.Adagrad": (UpdateRule({"sum": StateRole("sum")}, {"step"}),),
    "torch.optim.adadelta.Adadelta": (UpdateRule({"square_avg": _SQUARE, "acc_delta": _SQUARE}, {"step"}),),
    "torch.optim.sgd.SGD": (_BUFFER,),
    "torch.optim.Muon": (_BUFFER,),
    "torch.optim.Adafactor": (
        UpdateRule({"row_var": StateRole("factor"), "col_var": StateRole("factor")}, {"step"}),
        UpdateRule({"variance": StateRole("factor")}, {"step"}),
    ),
    "transformers.optimization.Adafactor": (
        UpdateRule(_FACTORS, {"step", "RMS"}),
        UpdateRule({**_FACTORS, "exp_avg": _MOMENTUM}, {"step", "RMS"}),
        UpdateRule({"exp_avg_sq": StateRole("factor")}, {"step", "RMS"}),
        UpdateRule({"exp_avg_sq": StateRole("factor"), "exp_avg": _MOMENTUM}, {"step", "RMS"}),
    ),
    "bitsandbytes.optim.adam.Adam": (_ADAM_OF_BITSANDBYTES,),
    "bitsandbytes.optim.adamw.AdamW": (_ADAM_OF_BITSANDBYTES,),
    "bitsandbytes.optim.lion.Lion": (_MOMENTUM_OF_BITSANDBYTES,),
    "bitsandbytes.optim.sgd.SGD": (_MOMENTUM_OF_BITSANDBYTES,),
    "bitsandbytes.optim.rmsprop.RMSprop": (UpdateRule({"state1": _SQUARE}, {"step"}),),
    "lion_pytorch.lion_pytorch.Lion": (UpdateRule({"exp_avg": _MOMENTUM}),),
    # Prodigy estimates its rate from `s`, so an error there would change the rate of all weights.
    "prodigyopt.prodigy.Prodigy": (UpdateRule(_MOMENTS, {"step", "s", "p0"}),),
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": (_OF_SCHEDULE_FREE,),
    "schedulefree.radam_schedulefree.RAdamScheduleFree": (_OF_SCHEDULE_FREE,),
    "schedulefree.sgd_schedulefree.SGDScheduleFree": (UpdateRule({"z": StateRole("iterate")}),),
    "pytorch_optimizer.optimizer.adopt.ADOPT": (UpdateRule({"exp_avg": _MOMENTUM, "exp_avg_sq": _SQUARE}),),
    "pytorch_optimizer.optimizer.ademamix.AdEMAMix": (UpdateRule({**_MOMENTS, "exp_avg_slow": _MOMENTUM}),),
}


def register_update_rule(optimizer_class: str, *rules: UpdateRule) -> None:
    """Add the rule of an optimizer of your own, so that lossy modes round its states.

    Derive it from the update that the class makes. `Policy` rounds each role in its own way.

    Args:
        optimizer_class: Module and name of the class. It serves subclasses that do not change `step` too.
        rules: One or several. For each parameter the first one counts that has just the states of the parameter.

    Raises:
        ConfigError: The class has another rule already, or there is no rule.

    Examples:
        >>> rule = UpdateRule({"velocity": StateRole("momentum")}, exact={"step"})
        >>> register_update_rule("doctest.Signs", rule)
        >>> RULES.pop("doctest.Signs") == (rule,)
        True
    """
    where = f"register_update_rule({optimizer_class!r})"
    if not rules or not all(isinstance(rule, UpdateRule) for rule in rules):
        raise ConfigError(where, "at least one UpdateRule", repr(rules), "Pass one for each set of states.")
    if RULES.setdefault(optimizer_class, rules) != rules:
        next_step = "Remove one of the two calls: a class has one set of rules."
        raise ConfigError(where, "a class without rules", "one that has other rules already", next_step)


def state_of(rule: UpdateRule | None, key: Any) -> StateRole:
    """Return the role of a state under a rule; under no rule, and for keys that the rule does not name, it is exact."""
    return _EXACT if rule is None else rule.states.get(key, _EXACT)
