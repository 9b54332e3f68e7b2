"""Kafka by way of confluent-kafka: the only package that knows librdkafka.

==================  ==================================================================================
``settings``        which properties our clients run with, which a user may not set, guards for the user's functions
``errors``          librdkafka's errors become ours, here and nowhere else
``readers``         the coordination topic onwards (:class:`KafkaTail`), the user's messages (:class:`KafkaDataReader`)
``writers``         to the coordination topic (:class:`KafkaAppender`), to users' topics, and that in transactions
``range_reader``    one range of offsets, once: what Spark's executors do for the stream source
``questions``       what is asked of the brokers, again while the answer passes by itself; by one AdminClient
``groups``          Kafka's own consumer groups, from outside
``cluster``         :class:`KafkaCluster`: look-ups, and the factory of the others
==================  ==================================================================================
"""

from kafka_marshal.adapters.kafka.cluster import KafkaCluster

__all__ = ["KafkaCluster"]
