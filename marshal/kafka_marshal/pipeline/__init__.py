"""The Spark side: claimed batches, a streaming source, the audit of a whole history. Needs the extra ``[spark]``."""

from kafka_marshal.errors import SparkMissingError, needs

needs("spark", "pyspark", "pyarrow", kind=SparkMissingError)
