"""How two forms of routing are judged by float64's logits."""

from dataclasses import replace

import numpy as np
import pytest

from cuq1.config import load_config
from cuq1.cuda.weights import weights_plan
from cuq1.errors import Cuq1Error
from cuq1.models import decode, q1
from tests.kernels.twins import rows as twin
from tests.paths import NANO
from tools.check_routing import LIMITS, Form, Found, _places, judge

TOP_K = 8


def form(logits):
    ids, weights = twin.route(logits, TOP_K)
    return Form(logits, ids.astype(np.int32), weights.astype(np.float32))


def fresh(rng, rows=8, experts=32):
    """Logits with half of the limits' errors, and the forms that they give."""
    exact = rng.standard_normal((rows, experts))
    size = np.sqrt(np.mean(exact**2, axis=1, keepdims=True))
    noise = {name: rng.uniform(-0.5, 0.5, exact.shape) * limit * size for name, limit in LIMITS.items()}
    return exact, {name: form(exact + noise[name]) for name in LIMITS}


def near_tie(exact, gap):
    """The eighth and ninth expert of row 0 are `gap` apart."""
    order = np.argsort(-exact[0])
    exact[0, order[TOP_K]] = exact[0, order[TOP_K - 1]] - gap
    return order[TOP_K - 1], order[TOP_K]


def test_forms_within_their_errors_pass():
    exact, forms = fresh(np.random.default_rng(0))
    found = Found()
    judge(exact, forms, "here", found)
    assert found.rows == 8
    assert 0 < found.worst["folded"] <= LIMITS["folded"] < found.worst["unfolded"] <= LIMITS["unfolded"]


def test_a_tie_that_errors_explain_is_listed():
    exact, _ = fresh(np.random.default_rng(1))
    eighth, ninth = near_tie(exact, 1e-6)
    logits = exact.copy()
    logits[0, ninth] += 1e-4
    forms = {"folded": form(exact), "unfolded": form(logits)}
    found = Found()
    judge(exact, forms, "here", found)
    (place,) = found.places
    assert place.startswith(f"here, row 0: folded [{eighth}], unfolded [{ninth}]; float64's logits differ by 1.0e-06")


def test_a_choice_that_errors_do_not_explain_is_refused():
    exact, _ = fresh(np.random.default_rng(2))
    near_tie(exact, 1e-2)
    right = form(exact)
    ids = right.ids.copy()
    ids[0, TOP_K - 1] = np.argsort(-exact[0])[TOP_K]
    with pytest.raises(Cuq1Error, match=r"differ by 1\.0e-02, errors reach 0"):
        judge(exact, {"folded": right, "unfolded": replace(right, ids=ids)}, "here", Found())
    ids[0, TOP_K - 1] = ids[0, 0]
    with pytest.raises(Cuq1Error, match="twice"):
        judge(exact, {"folded": right, "unfolded": replace(right, ids=ids)}, "here", Found())


@pytest.mark.parametrize("name", LIMITS)
def test_an_error_above_its_limit_is_refused_whatever_is_chosen(name):
    exact, forms = fresh(np.random.default_rng(3))
    wrong = forms[name].logits.copy()
    wrong[3] *= 1 + 4 * LIMITS[name]
    with pytest.raises(Cuq1Error, match=f"row 3: {name} logits are"):
        judge(exact, {**forms, name: form(wrong)}, "here", Found())
    wrong[3, 0] = np.nan
    with pytest.raises(Cuq1Error, match=f"row 3: {name} logits are"):
        judge(exact, {**forms, name: replace(forms[name], logits=wrong)}, "here", Found())


def test_weights_that_logits_do_not_explain_are_refused():
    exact, forms = fresh(np.random.default_rng(4))
    weights = forms["folded"].weights.copy()
    weights[2, 0] += 0.01
    with pytest.raises(Cuq1Error, match="row 2: weights differ by 1"):
        judge(exact, {**forms, "folded": replace(forms["folded"], weights=weights)}, "here", Found())


def test_both_forms_are_stepped_up_to_their_choice():
    config, _ = load_config(NANO)
    layout = weights_plan(config, None)
    folded = q1.resolve(config, None, layout, capacity=128)
    expected = {
        True: ["o_proj", "attn_tail", "gate_up"],
        False: ["o_proj", "attn_tail", "router", "route", "gate_up"],
    }
    for form_, labels in expected.items():
        plan = decode.target_of(replace(folded, folded=form_), 8)
        places = _places(plan)
        assert {layer for _, layer in places} == set(range(1, 6))
        for layer in range(1, 6):
            first = places["o_proj", layer]
            assert [places[label, layer] - first for label in labels[:-1]] == list(range(len(labels) - 1))
            assert plan.launches[first + len(labels) - 1].label == "gate_up"
