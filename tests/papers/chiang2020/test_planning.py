"""Every run is planned once, however many rows share it."""

from dataclasses import replace

from patchcert.data import load_dataset
from patchcert.evidence.results import Circumstances
from patchcert.papers.chiang2020.planning import Effort, plan, read_questions
from patchcert.papers.chiang2020.recipes import QUICK_DATA, Scale, parse_scale
from patchcert.papers.chiang2020.tables import find_table
from patchcert.train.run_folder import Run

TINY = Scale(quick=True, quick_train=60, quick_test=10)


def planned(text, table="strategy-detail-5x5", **effort):
    return plan(find_table(table).chosen([text]), Effort(TINY, **effort), None)


def test_rows_share_runs_and_their_questions_are_gathered():
    entries = find_table("shape-transfer").chosen(["mnist line", "mnist square"])
    made = plan(entries, Effort(TINY), None)
    assert [len(each.questions) for each in made] == [3, 3, 3]
    assert {question.selection.limit for each in made for question in each.questions} == {10}
    assert len({each.name for each in made}) == 3


def test_votes_for_all_rows_are_one_question():
    (made,) = planned("mnist ablation", "sparse-vs-ablation")
    (question,) = made.questions
    assert (question.selection.drawn, question.classifier["estimation_samples"]) == (10, 100)


def test_seeds_and_rounding_are_runs_of_their_own():
    once = {each.name for each in planned("mnist all mlp")}
    thrice = planned("mnist all mlp", seeds=3)
    rounded, rougher = (
        {each.name for each in planned("mnist all mlp", **{how: True})} for how in ("tf32", "bfloat16")
    )
    assert len(thrice) == 3
    assert once < {each.name for each in thrice}
    assert not once & rounded
    assert not rougher & (once | rounded)
    assert [each.label for each in thrice][1] == "mnist-mini mlp all 5x5 square seed 2020"


def test_the_folder_of_a_run_is_named_by_specification_and_data():
    (made,) = planned("mnist all mlp")
    assert made.name == made.spec.fingerprint(load_dataset(QUICK_DATA).checksums)


def test_an_assignment_is_read_as_it_was_written(tmp_path):
    entries = find_table("compare-defenses").chosen(["mnist 2x2"])
    for made in plan(entries, Effort(TINY), None):
        replace(made, scale=0.5).write(tmp_path / made.name, jobs=3)
        assert read_questions(tmp_path / made.name) == ("", made.questions)
        assert Circumstances.read(tmp_path / made.name) == Circumstances(0.5, 3)
        assert Run.open(tmp_path / made.name).spec == made.spec


def test_a_quick_look_never_uses_the_papers_images():
    for name in ("training-strategies", "large-models", "bound-pooling", "sparse-detail", "shape-transfer"):
        made = plan(find_table(name).chosen([]), Effort(parse_scale("quick")), None)
        assert {each.spec.data.name for each in made} == {QUICK_DATA}
