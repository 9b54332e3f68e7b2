// Confluent's Parallel Consumer (side=parallel) and a share group (side=share): see __init__.py and work.py.

import io.confluent.parallelconsumer.ParallelConsumerOptions;
import io.confluent.parallelconsumer.ParallelStreamProcessor;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicIntegerArray;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.config.ConfigResource;

public class Peers {
    static final Map<String, String> order = new HashMap<>();
    static AtomicIntegerArray ended;
    static final Set<Long> failed = ConcurrentHashMap.newKeySet();
    static final AtomicInteger inversions = new AtomicInteger();
    static final AtomicInteger done = new AtomicInteger();
    static volatile long began, last;
    static long workNanos, stuck;
    static int failEvery;

    static int number(String name) {
        return Integer.parseInt(order.get(name));
    }

    static long seconds(String name) {
        return (long) (Double.parseDouble(order.get(name)) * 1e9);
    }

    public static void main(String[] args) throws Exception {
        for (String argument : args) {
            String[] parts = argument.split("=", 2);
            order.put(parts[0], parts[1]);
        }
        ended = new AtomicIntegerArray(number("records"));
        workNanos = (long) (Double.parseDouble(order.get("work_ms")) * 1e6);
        stuck = number("stuck");
        failEvery = number("fail_every");
        if (order.get("side").equals("parallel")) parallel();
        else share();
        await();
        tell();
        Runtime.getRuntime().halt(0);
    }

    static void handle(ConsumerRecord<byte[], byte[]> record) throws Exception {
        long offset = record.offset();
        if (began == 0) began = System.nanoTime();
        if (workNanos > 0) {
            int before = Integer.parseInt(new String(record.value(), 0, 10, StandardCharsets.US_ASCII).trim());
            if (before >= 0 && ended.get(before) == 0) inversions.incrementAndGet();
            if (failEvery > 0 && offset % failEvery == 1 && failed.add(offset)) throw new RuntimeException("fails once");
        }
        if (offset == stuck) new CountDownLatch(1).await();
        if (workNanos > 0) Thread.sleep(workNanos / 1_000_000, (int) (workNanos % 1_000_000));
        if (ended.getAndSet((int) offset, 1) == 0 && !new String(record.key()).equals(order.get("stuck_key"))) {
            last = System.nanoTime();
            done.incrementAndGet();
        }
    }

    static Map<String, Object> consumer(Map<String, Object> more) {
        Map<String, Object> config = new HashMap<>(more);
        config.put("bootstrap.servers", order.get("bootstrap"));
        config.put("group.id", order.get("group"));
        String deserializer = "org.apache.kafka.common.serialization.ByteArrayDeserializer";
        config.put("key.deserializer", deserializer);
        config.put("value.deserializer", deserializer);
        return config;
    }

    static void parallel() {
        KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(
            consumer(Map.of("enable.auto.commit", "false", "auto.offset.reset", "earliest")));
        ParallelStreamProcessor<byte[], byte[]> processor = ParallelStreamProcessor.createEosStreamProcessor(
            ParallelConsumerOptions.<byte[], byte[]>builder()
                .consumer(consumer)
                .ordering(ParallelConsumerOptions.ProcessingOrder.KEY)
                .maxConcurrency(number("concurrency"))
                .commitMode(ParallelConsumerOptions.CommitMode.PERIODIC_CONSUMER_ASYNCHRONOUS)
                .defaultMessageRetryDelay(Duration.ofMillis(2))
                .ignoreReflectiveAccessExceptionsForAutoCommitDisabledCheck(true)
                .build());
        processor.subscribe(List.of(order.get("topic")));
        processor.poll(context -> {
            try {
                handle(context.getSingleConsumerRecord());
            } catch (RuntimeException error) {
                throw error;
            } catch (Exception error) {
                throw new RuntimeException(error);
            }
        });
    }

    static void share() throws Exception {
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", order.get("bootstrap")))) {
            ConfigResource group = new ConfigResource(ConfigResource.Type.GROUP, order.get("group"));
            ConfigEntry earliest = new ConfigEntry("share.auto.offset.reset", "earliest");
            admin.incrementalAlterConfigs(
                Map.of(group, List.of(new AlterConfigOp(earliest, AlterConfigOp.OpType.SET)))).all().get();
        }
        for (int each = 0; each < number("concurrency"); each++) new Thread(Peers::shareOne).start();
    }

    static void shareOne() {
        // Fewer than 2,000 (the broker's locks for a partition) / 16; the least that keeps a consumer busy is best.
        Map<String, Object> more = Map.of(
            "share.acknowledgement.mode", "explicit",
            "share.acquire.mode", "record_limit",
            "max.poll.records", System.getProperty("share.records", "50"));
        try (KafkaShareConsumer<byte[], byte[]> consumer = new KafkaShareConsumer<>(consumer(more))) {
            consumer.subscribe(List.of(order.get("topic")));
            while (true) {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(100))) {
                    try {
                        handle(record);
                        consumer.acknowledge(record, AcknowledgeType.ACCEPT);
                    } catch (Exception error) {
                        consumer.acknowledge(record, AcknowledgeType.RELEASE);
                    }
                }
                consumer.commitAsync();
            }
        }
    }

    static void await() throws Exception {
        long start = System.nanoTime(), seenAt = start, quiet = seconds("quiet_s"), limit = seconds("limit_s");
        int seen = 0;
        while (done.get() < number("others")) {
            Thread.sleep(5);
            long now = System.nanoTime();
            if (done.get() != seen) {
                seen = done.get();
                seenAt = now;
            }
            boolean isQuiet = began != 0 && now > Math.max(began, seenAt) + quiet;
            if (isQuiet || now > (began == 0 ? start + limit : began) + limit) {
                last = now;
                return;
            }
        }
    }

    static void tell() throws Exception {
        String peak = "0";
        Path status = Path.of("/proc/self/status");
        if (Files.exists(status)) {
            for (String line : Files.readAllLines(status)) {
                if (line.startsWith("VmHWM")) peak = line.replaceAll("[^0-9]", "");
            }
        }
        System.out.printf(
            java.util.Locale.ROOT,
            "{\"done\": %d, \"seconds\": %.6f, \"inversions\": %d, \"cpu_s\": 0, \"peak_mb\": %.1f}%n",
            done.get(), began == 0 ? 1.0 : (last - began) / 1e9, inversions.get(), Double.parseDouble(peak) / 1000);
        System.out.flush();
    }
}
