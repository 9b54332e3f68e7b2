"""The audit: a whole history, replayed by the rationalizer in Spark's executors and checked.

audit       Audit: cut, replay, compare, combine            findings    its result, and what hashes confirm
sources     dumps and Parquet     kafka     the topic itself, and its archive     plan    where a log can be cut
task        replays one segment in an executor; functions on Spark, or in this process
observer    records and outcomes as rows of tables          invariants  violations
files       the tables' columns     report     the page     owners      which member handled which message
"""
