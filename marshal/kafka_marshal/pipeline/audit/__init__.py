"""The audit: a whole history, replayed by the rationalizer in Spark's executors and checked.

audit       Audit: cut, replay, compare, combine            findings    its result
sources     dumps and Parquet     kafka     the topic itself     snapshots, plan    where a log can be cut
task        replays one segment in an executor              job         functions on Spark, or in this process
observer    records and outcomes as rows of tables          invariants  violations
stitch      combines segments                               statistics  takeover times, churn, rejected records
schemas     the tables' columns     report     the page     owners      which member handled which message
"""
