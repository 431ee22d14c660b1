"""`epmoe bench`: how fast is every stage, against the floor and against what people use today?

Read in this order: `workload` (what is computed), `subjects` and `peers` (who computes it), `gates` (is it right?),
`method` (how a time becomes a number), `run` (all of it, on a rank), `results` (what is kept), `report` (what it says)
"""
