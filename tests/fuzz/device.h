/* Two RDMA devices, "fuzz0" and "fuzz1", in the place of libibverbs: one that does everything at once, on the caller's
 * thread, so that an input does the same each time. Queue pairs that are connected to each other reach each other; those
 * that are connected to DEVICE_STRANGER the fuzzer, who is named by the number of the queue pair.
 *
 * It demands what a device would punish: each piece of memory in a work request lies in a region of its key, no queue runs
 * over, no message finds a receiver that is not ready, and in the end nothing is left. */
#ifndef RAILRELAY_FUZZ_DEVICE_H
#define RAILRELAY_FUZZ_DEVICE_H

#include <stdint.h>

enum { DEVICE_STRANGER = 0xfffff, DEVICE_HEARD_BYTES = 256 };
enum device_heard { DEVICE_NOTHING, DEVICE_SEND, DEVICE_IMMEDIATE };

/* What the fuzzer sends to a queue pair; nothing happens if it cannot receive. */
void device_say(uint32_t queue_pair, const void *bytes, uint32_t count);
void device_say_immediate(uint32_t queue_pair, uint32_t immediate);
/* The oldest that the queue pair has sent to the fuzzer and that was not heard yet, of the latest few. */
enum device_heard device_hear(uint32_t queue_pair, uint8_t *bytes, uint32_t *immediate);
/* Writes these bytes with a key. Without the right to, the queue pair fails, as would its sender's. */
void device_write(uint32_t queue_pair, uint32_t rkey, uint64_t address, const void *bytes, uint32_t count);
/* What it sends from now on completes only when this is called again; error: it does not, and the queue pair fails. */
void device_stall(uint32_t queue_pair, int stalled, int error);
/* The fuzzer's end is gone. */
void device_leave(uint32_t queue_pair);
/* Nothing must be left. */
void device_check(void);

#endif
