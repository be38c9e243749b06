"""Runs a user's function of texts (a reward, an environment) in processes of its own, under deadlines.

The function takes lists of texts and returns a list (`batched`), or takes one text of each list and returns one answer.
Either may be a coroutine function. A row that the function cannot answer costs only itself: its answer is a `Failed`.
- A function that raises for a batch is retried row by row.
- A function that hangs, even one that holds the GIL, is killed with its process and every process it started.
- Coroutines of single rows run concurrently; one that hangs is cancelled alone. Other functions of single rows are called
  row by row, and side by side in further processes if rows wait for long.
- A missed deadline is logged at once, with the line at which the function was.
- If the first process cannot import the function, the call raises RunError, because the function may be broken. If a
  replacement of a lost process cannot, the rows that waited for it fail.

Every call ends within four times `timeout_s` plus the start of one process. Each row of a failed batch is retried once,
under `timeout_s` or an equal share of the time left in the call, whichever is less. Hanging rows cannot take time from the
others, and fast rows leave theirs to the rest. Rows that the time does not reach fail. A plain function of single rows has
`timeout_s` for each row and no limit for the call.

`runner` has the interface, `process` is the parent's side of a child process, and `child` is its program.
"""
