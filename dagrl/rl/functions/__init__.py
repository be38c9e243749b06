"""Runs a user's function of texts (a reward, an environment) in processes of its own, under deadlines.

The function takes lists of texts and returns a list (`batched`), or takes one text of each list and returns one answer.
Either may be a coroutine function. A row that the function cannot answer costs only itself: its answer is a `Failed`.
- A function that raises for a batch is retried row by row.
- Batches of a function that takes milliseconds share a message to its process. If it hangs there, each is asked for alone.
- A function that hangs, even one that holds the GIL, is killed with its process and every process it started.
- Coroutines of single rows run concurrently; one that hangs is cancelled alone. Other functions of single rows are called
  row by row, and side by side in further processes if rows wait for long.
- A missed deadline is logged at once, with the line at which the function was.
- If the first process cannot import the function, the call raises RunError, because the function may be broken. If a
  replacement of a lost process cannot, the rows that waited for it fail.

A batch has `timeout_s`, and so has each of its rows when it is retried.

`runner` has the interface, `process` is the parent's side of a child process, and `child` is its program.
"""
