"""One suite for every stage: what the seam promises, tested on 1 to 4 ranks.

    pytest --pyargs epmoe.core.conformance                        every registered stage
    pytest --pyargs epmoe.core.conformance --stage my_stage       one, also of another package
    pytest --pyargs epmoe.core.conformance --stage fixed_capacity+triton       an exchange with other experts
    pytest --pyargs epmoe.core.conformance --stage pairs          every pair that fits and is no stage
    pytest --pyargs epmoe.core.conformance --ranks 2 --device cuda

`program` holds what runs on the ranks, `plugin` the options and fixtures, the `test_*` modules the checks by topic.
Values are judged by `epmoe.core.verify`, in one place. What a stage does not offer by its capabilities is skipped, with
the reason (`-rs` shows it). Ranks start once per session and are reused.

A folder with tests of its own for one stage takes the suite over with

    from epmoe.core.conformance.everything import *
    STAGE = "my_stage"

When the same check of the same stage is collected twice, one is deselected.
"""
