"""Trees of specs: patterns over paths, prefixes, and the messages of what does not fit."""

import copy
import pickle
import re
from collections import OrderedDict, namedtuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftp.errors import SpecError
from ftp.sharding.patterns import matches, narrows
from ftp.sharding.plan import plan
from ftp.sharding.pytree import (
    KeyOrders,
    Specs,
    broadcast_specs,
    check_specs,
    flatten,
    leaf_names,
    leaf_paths,
    remember_tied,
)
from ftp.sharding.spec import P

PARAMS = {
    "emb.weight": torch.ones(8, 4),
    "layers.0.attn.wq.weight": torch.ones(4, 4),
    "layers.0.attn.wo.weight": torch.ones(4, 4),
    "layers.1.attn.wq.weight": torch.ones(4, 4),
    "layers.1.attn.wo.weight": torch.ones(4, 4),
    "norm.weight": torch.ones(4),
}
NESTED = {
    "mlp": {"up": torch.ones(4, 8), "down": torch.ones(8, 4)},
    "norms": [torch.ones(4), torch.ones(4)],
    "steps": 3,
}


def error_of(call):
    with pytest.raises(SpecError) as error:
        call()
    return str(error.value)


elements = st.text("ab0", min_size=1, max_size=3)
pattern_elements = st.one_of(
    st.just("**"),
    st.text("ab0*?", min_size=1, max_size=3).filter(lambda e: "**" not in e),
    st.sampled_from(["[ab]", "[!a]0"]),
)


@given(st.lists(pattern_elements, max_size=4), st.lists(elements, max_size=5))
def test_a_pattern_is_a_regular_expression_over_elements(pattern, path):
    regex = ""
    for element in pattern:
        one = element.replace("[!", "[^").replace("?", "[^.]").replace("*", "[^.]*")
        regex += r"(?:[^.]+\.)*" if element == "**" else rf"{one}\."
    expected = re.fullmatch(regex, "".join(e + "." for e in path)) is not None
    assert matches(".".join(pattern), tuple(path)) == expected


@given(st.lists(elements, max_size=5))
def test_a_path_matches_itself_and_double_stars_match_all(path):
    assert matches(".".join(path), tuple(path))
    assert matches("**", tuple(path))
    assert matches("*", tuple(path)) == (len(path) == 1)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("emb.weight", ["emb.weight"]),
        ("layers.*.attn.w[qkv].weight", ["layers.0.attn.wq.weight", "layers.1.attn.wq.weight"]),
        ("layers.1.**", ["layers.1.attn.wo.weight", "layers.1.attn.wq.weight"]),
        ("**.wo.*", ["layers.0.attn.wo.weight", "layers.1.attn.wo.weight"]),
        ("*.weight", ["emb.weight", "norm.weight"]),
        ("**", list(PARAMS)),
    ],
)
def test_patterns_give_specs(pattern, matched):
    specs = plan(PARAMS, {pattern: P("tp")})
    assert specs.keys() == PARAMS.keys()
    assert {path for path, spec in specs.items() if spec} == set(matched)


def test_a_plan_has_the_structure_of_its_params():
    Pair = namedtuple("Pair", "a b")
    for params in (
        PARAMS,
        NESTED,
        OrderedDict(NESTED),
        [torch.ones(2)],
        Pair(torch.ones(2), {"c": torch.ones(1)}),
        torch.ones(3),
    ):
        specs = plan(params, {})
        assert (
            broadcast_specs(specs, params, "params")
            == flatten(specs)[0]
            == [P()] * len(flatten(params)[0])
        )
    specs = plan(NESTED, {"mlp.*": P("tp"), "norms.1": P("dp")})
    assert specs == {"mlp": {"up": P("tp"), "down": P("tp")}, "norms": [P(), P("dp")], "steps": P()}
    assert specs["norms"][1] == P("dp")
    assert optree.tree_leaves(specs) == [P("tp"), P("tp"), P(), P("dp"), P()]
    assert type(optree.tree_map(str, specs)) is dict
    for same in (copy.deepcopy(specs), pickle.loads(pickle.dumps(specs)), copy.copy(specs)):
        assert same == specs
        assert str(same) == str(specs)
    assert broadcast_specs({"m": specs, "n": P("dp")}, {"m": NESTED, "n": [1, 2]}, "state") == [
        *flatten(specs)[0],
        P("dp"),
        P("dp"),
    ]


def test_a_plan_prints_as_a_table():
    specs = plan(NESTED, {"mlp.*": P("tp"), "norms.1": P("dp")})
    specs["norms"][0] = P("dp")
    assert str(specs) == "\n".join(
        [
            "path      spec     shape   given by",
            "mlp.down  P('tp')  (8, 4)  'mlp.*'",
            "mlp.up    P('tp')  (4, 8)  'mlp.*'",
            "norms.0   P('dp')  (4,)    set by hand",
            "norms.1   P('dp')  (4,)    'norms.1'",
            "steps     P()              no pattern: replicated",
        ]
    )


def test_a_function_gives_specs():
    def cut_matrices(path, leaf):
        return P("dp") if leaf.ndim == 2 else P()

    specs = plan(PARAMS, cut_matrices, strict=True)
    assert specs["emb.weight"] == P("dp")
    assert "norm.weight              P()      (4,)    cut_matrices()" in str(specs)
    message = error_of(
        lambda: plan(PARAMS, lambda path, leaf: ("dp", None) if path == "emb.weight" else P())
    )  # pyright: ignore
    assert (
        message
        == "<lambda>() gives ('dp', None), a tuple, for path 'emb.weight'; it must give a P. Try"
        " P('dp', None)."
    )


def test_equal_specs_do_not_disagree():
    assert plan(PARAMS, {"emb.*": P("tp"), "emb.weight": P("tp", None)})["emb.weight"] == P("tp")


def test_two_keys_may_have_the_same_path():
    specs = plan(
        {"a.b": torch.ones(2), "a": {"b": torch.ones(2, 2)}},
        lambda path, leaf: P("tp") if leaf.ndim == 2 else P(),
    )
    assert specs == {"a.b": P(), "a": {"b": P("tp")}}


def test_every_failure_of_a_plan_is_reported_at_once():
    patterns = {
        "layers.*.atn.wq.weight": P("tp"),
        "norm": P(),
        "wo.weight": P("tp"),
        "layers.*.attn.wq.weight": P("tp"),
        "layers.0.**": P(None, "tp"),
        "emb.weight": ("tp", None),
        "norm.*": P("tp", None, "dp"),
        3: P(),
    }
    assert error_of(lambda: plan(PARAMS, patterns, strict=True)).split("\n") == [  # pyright: ignore
        "pattern 'layers.*.atn.wq.weight' matches no path of params; the nearest are"
        " 'layers.0.attn.wq.weight', 'layers.0.attn.wo.weight', 'emb.weight'.",
        "pattern 'norm' matches no path of params; 'norm.**' matches 1.",
        "pattern 'wo.weight' matches no path of params; '**.wo.weight' matches 2.",
        "patterns['emb.weight'] is ('tp', None), a tuple; it must be a P. Try P('tp', None).",
        "3 is no pattern; a pattern is a str of path elements joined by '.'.",
        "patterns 'layers.*.attn.wq.weight' and 'layers.0.**' disagree for"
        " params['layers.0.attn.wq.weight']: P('tp') and P(None, 'tp'). Give both the same value,"
        " or narrow one.",
        "params['norm.weight'] gets P('tp', None, 'dp') of 3 entries from 'norm.*', but its shape"
        " (4,) has 1 dims. Give at most 1.",
        "strict=True, and no pattern matches params['emb.weight'],"
        " params['layers.1.attn.wo.weight']. Give a pattern for each; P() replicates.",
    ]


@pytest.mark.parametrize(
    ("pattern", "wider"),
    [
        ("**norm.weight", "'**.*norm.weight' matches 1."),
        ("**w[qo].weight", "'**.*w[qo].weight' matches 4."),
        ("layers**", "'layers*.**' matches 4."),
        ("layers.**attn.*.weight", "'layers.**.*attn.*.weight' matches 4."),
        ("**nrom", "Put a '.' between them."),
    ],
)
def test_many_elements_are_not_joined_to_a_part_of_one(pattern: str, wider: str):
    """It matched one element, in silence: a norm of a layer kept its weight decay."""
    assert error_of(lambda: plan(PARAMS, {pattern: P()})) == (
        f"pattern '{pattern}' of params joins '**', which is any number of path elements, to a part"
        f" of one. {wider}"
    )
    assert plan({"a**": PARAMS["norm.weight"]}, {"a**": P("dp")}) == {"a**": P("dp")}


def test_only_tensors_are_cut():
    assert error_of(lambda: plan(NESTED, {"**": P("dp")})) == (
        "params['steps'] is 3, an int, and gets P('dp') from '**'; only a tensor can be cut. Give"
        " P()."
    )
    assert plan(NESTED, {"mlp.**": P("dp"), "steps": P()})["steps"] == P()


def test_patterns_are_a_dict_or_a_function():
    assert error_of(lambda: plan(PARAMS, P("dp"))) == (  # pyright: ignore
        "plan(params, patterns) takes a dict of patterns or a function, not P('dp'), a"
        " PartitionSpec."
        " For one spec everywhere give {'**': P('dp')}."
    )
    assert error_of(lambda: plan({}, {"a": P()})) == "pattern 'a' matches nothing: params is empty."


def test_a_tied_weight_answers_to_each_of_its_paths():
    weight = torch.ones(8, 4)
    remember_tied(weight, ["emb.weight", "head.weight"])
    params = {"model": {"emb": {"weight": weight}}, "other": torch.ones(2)}
    assert plan(params, {"**.head.weight": P("tp")})["model"]["emb"]["weight"] == P("tp")
    assert "'model.emb.weight', 'model.head.weight'" in error_of(
        lambda: plan(params, {"model.emb.weight": P("tp"), "model.head.weight": P("dp")})
    )
    assert error_of(
        lambda: plan(params, lambda path, leaf: P("tp") if "head" in path else P())
    ) == (
        "params['model']['emb']['weight'] is one tied weight, and <lambda>() gives P() for"
        " 'model.emb.weight' and P('tp') for"
        " 'model.head.weight'. Give the same spec for each of its paths."
    )


def test_a_prefix_covers_what_is_below_it():
    assert broadcast_specs(P("dp"), NESTED, "params") == [P("dp")] * 5
    specs = {"mlp": P("tp"), "norms": [P(), P("dp")], "steps": P()}
    assert broadcast_specs(specs, NESTED, "params") == [P("tp"), P("tp"), P(), P("dp"), P()]
    assert broadcast_specs(OrderedDict(steps=P(), norms=P(), mlp=P("tp")), NESTED, "params")[
        :2
    ] == [P("tp"), P("tp")]
    assert broadcast_specs({"a": None, "b": P()}, {"a": None, "b": None}, "state") == []
    assert broadcast_specs((P("dp"),), ({"x": 1, "y": None},), "batch") == [P("dp")]


trees = st.recursive(
    st.integers(0, 9),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.dictionaries(elements, children, max_size=3),
        st.tuples(children, children),
    ),
    max_leaves=8,
)


@given(trees)
def test_a_full_tree_of_specs_is_its_own_broadcast(tree):
    specs = optree.tree_map(lambda n: P(*[None] * n, "tp"), tree)
    assert broadcast_specs(specs, tree, "x") == flatten(specs)[0]
    assert len(leaf_names(tree, "x")) == len(leaf_paths(tree)) == len(flatten(tree)[0])


Pair = namedtuple("Pair", "first second")


def reordered(tree, draw):
    """The tree with the keys of each dict in an order that is drawn."""
    if isinstance(tree, Specs):
        return Specs({key: reordered(child, draw) for key, child in tree.items()}, {})
    if isinstance(tree, dict):
        return {key: reordered(tree[key], draw) for key in draw(st.permutations(list(tree)))}
    if isinstance(tree, Pair):
        return Pair(*[reordered(child, draw) for child in tree])
    if isinstance(tree, list | tuple):
        return type(tree)(reordered(child, draw) for child in tree)
    return tree


@given(trees, trees, st.data())
def test_key_orders_hold_where_every_dict_has_its_keys_in_the_same_order(one, other, data):
    given = ([one, Specs({"b": other, "a": one}, {})], Pair(one, other))
    orders, now = KeyOrders(given), reordered(given, data.draw)
    assert orders.hold(given)
    # Of a tree whose leaves are equal, the text shows the order alone.
    assert orders.hold(now) == (repr(now) == repr(given))


def test_errors_of_a_spec_tree():
    specs = {"mlp": {"upp": P("tp"), "down": ("tp", None)}, "norms": (P(), P()), "steps": None}
    assert error_of(lambda: broadcast_specs(specs, NESTED, "params")).split("\n") == [
        "the specs name params['mlp']['upp'], which does not exist; the nearest is 'up'.",
        "the specs go deeper than the tree: params['mlp']['down'] is a leaf, a Tensor, its spec is"
        " a tuple. Try P('tp', None).",
        "no spec is given for params['mlp']['up']. Give one; P() replicates.",
        "params['norms'] is a list, its specs are a tuple; give a list of specs, or one P for all"
        " of it.",
        "the spec for params['steps'] is None; it must be a P. P() replicates.",
    ]


def test_a_spec_under_another_name_of_a_tied_weight_is_an_error_that_names_it():
    embed = torch.ones(4, 2)
    remember_tied(embed, ["embed.weight", "head.weight"])
    params, specs = {"embed.weight": embed}, {"head.weight": P("tp")}
    assert error_of(lambda: broadcast_specs(specs, params, "params")).split("\n")[0] == (
        "the specs name params['head.weight'], which is tied to 'embed.weight'; give its spec under"
        " that name."
    )


def test_specs_are_checked_against_leaves_and_axes_all_at_once():
    message = error_of(
        lambda: check_specs(
            [P("tp", None, None), P("x"), P("tp"), P()],
            [torch.ones(4, 4), torch.ones(2), 3, "s"],
            ["a", "b", "c", "d"],
            {"tp": 2},
        )
    )
    assert message.split("\n") == [
        "a has spec P('tp', None, None) of 3 entries, but its shape (4, 4) has 2 dims. Give at"
        " most 2 entries.",
        "b has spec P('x'), but the mesh has no axis 'x'; its axes are 'tp' (size 2).",
        "c has spec P('tp'), but is 3, an int; only a tensor can be cut. Give P().",
    ]


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ("w", "*"),
        ("layers.0.w", "layers.*.w"),
        ("layers.*.w", "**.w"),
        ("**.norm.weight", "**"),
        ("layers.*.attn.w[qk].weight", "layers.*.attn.w?.weight"),
        ("w[a-c]*", "w*"),
        ("*.a.b", "**.b"),
    ],
)
def test_of_two_patterns_the_more_specific_one_wins(narrow: str, wide: str):
    assert narrows(narrow, wide) and not narrows(wide, narrow)
    path = narrow.replace("**", "x").replace("[qk]", "q").replace("[a-c]", "b").replace("*", "y")
    params = {path: torch.ones(4), "other.w.b.weight.x": torch.ones(4)}
    for patterns in ({narrow: P(), wide: P("dp")}, {wide: P("dp"), narrow: P()}):
        found = plan({path: torch.ones(4)}, patterns)
        assert found[path] == P() and matches(wide, tuple(path.split(".")))
    assert plan(params, {"**": P("dp"), narrow: P()})["other.w.b.weight.x"] == P("dp")


elements = st.sampled_from(["a", "b", "ab", "*", "**", "a*", "?", "[ab]", "[!a]", "*b"])
paths = st.lists(st.sampled_from(["a", "b", "c", "ab", "bb", "abc"]), max_size=4).map(tuple)


@given(
    st.lists(elements, min_size=1, max_size=3).map(".".join),
    st.lists(elements, min_size=1, max_size=3).map(".".join),
    st.lists(paths, min_size=1, max_size=30),
)
def test_a_more_specific_pattern_matches_nothing_that_the_other_does_not(one, two, several):
    if narrows(one, two):
        assert all(matches(two, path) for path in several if matches(one, path))
        assert not narrows(two, one)
