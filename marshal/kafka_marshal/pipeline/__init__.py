"""The Spark side: claimed batches, a streaming source, the audit of a whole history. Needs the extra ``[spark]``."""

from kafka_marshal.errors import SparkMissingError
from kafka_marshal.extras import needs

needs("spark", "pyspark", "pyarrow", kind=SparkMissingError)
