"""The audit: a whole history replayed by the rationalizer in Spark's executors, and what follows from it.

audit       Audit: cut, replay, compare, put together       findings    what it found
sources     dumps and Parquet     kafka     the topic itself     snapshots, plan    where a log can be cut
task        one segment, replayed, in an executor           job         functions on Spark, or in this process
observer    records and outcomes as rows of tables          invariants  what must never be
stitch      segments put together again                     statistics  takeover times, churn, what was rejected
schemas     the tables' columns     report     the page     owners      who handled which message
"""
