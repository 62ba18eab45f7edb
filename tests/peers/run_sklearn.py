"""Runs scikit-learn's tests of model selection on a pool, with n_jobs=-1 wherever a test leaves it out."""

from __future__ import annotations

from figures import Figures
from peers import run

__all__ = ["SKIPPED", "main"]

# All of these but the last two fail in the same way with joblib's own process pool as the default backend.
WARNS = "catches warnings in this process; those of the fits are shown on the nodes"
COUNTS = "counts calls in objects of this process; the fits have copies"
FIRST = "wants the error of the first of several fits that fail at the same time"

SKIPPED = {
    "test_searchcv_raise_warning_with_non_finite_score": COUNTS,
    "test_multi_metric_search_forwards_metadata": COUNTS,
    "test_search_callbacks_receive_search_instance": COUNTS,
    "test_search_callbacks_with_partial_fit_failures": COUNTS,
    "test_cv_results[Halving": COUNTS,
    "test_base_estimator_inputs": COUNTS,
    "test_cross_val_score_score_func": COUNTS,
    "test_passed_unrequested_metadata": COUNTS,
    "test_validation_functions_routing": COUNTS,
    "test_learning_curve_exploit_incremental_learning_routing": COUNTS,
    "test_cross_validate_invalid_scoring_param": WARNS,
    "test_cross_val_predict[coo": WARNS,
    "test_cross_val_score_failing_scorer": WARNS,
    "test_cross_validate_failing_scorer": WARNS,
    "test_search_cv_verbose_3": "reads the standard output of this process; nodes print to their own",
    "test_grid_search_cv_splits_consistency": "a splitter that holds a generator cannot be pickled",
    "test_learning_curve_params": FIRST,
    "test_cross_val_predict_decision_function_shape": FIRST,
}

MODULES = ("test_search", "test_successive_halving", "test_validation", "test_classification_threshold")


def main() -> Figures:
    """Runs them."""
    modules = [f"sklearn.model_selection.tests.{name}" for name in MODULES]
    return run("scikit-learn model_selection", modules, SKIPPED, active=True)


if __name__ == "__main__":
    print(main())
