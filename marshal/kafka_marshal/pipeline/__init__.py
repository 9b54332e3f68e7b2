"""The Spark side: claimed batches, a streaming source, the audit of a whole history. Needs the extra ``[spark]``."""
