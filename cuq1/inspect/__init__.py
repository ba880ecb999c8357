"""python -m cuq1.inspect DIR: a checkpoint's sizes, what a rank holds, and the floor of a decode round."""
