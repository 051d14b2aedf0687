/* Fault points: the places where the death of a process could hurt most, by name. A process that is told to (faults.pyx)
 * kills itself at the n-th passage of one of them, so that tests need not hit it by chance.
 *
 * The words are private to the shared object that includes this file: no other process sees them, so a client can arm
 * nothing in the daemon. Off, a point costs one load of a word that nobody writes and a branch that is never taken. */
#ifndef RAILRELAY_FAULTS_H
#define RAILRELAY_FAULTS_H

#include <signal.h>
#include <stdint.h>
#include <unistd.h>

#include "atomics.h"

/* X(symbol, name, what has happened there and what has not). The part before the first dot is the process. */
#define RR_FAULT_POINTS(X) \
    X(CLIENT_LANE_RESERVED, "client.lane.reserved", "a slot is taken, nothing of it is written") \
    X(CLIENT_LANE_COPYING, "client.lane.copying", "a block is in the slot, its table entry is not") \
    X(CLIENT_LANE_FILLED, "client.lane.filled", "slot and table are filled, head has not moved") \
    X(CLIENT_LANE_ANNOUNCED, "client.lane.announced", "head has moved, the doorbell has not") \
    X(CLIENT_LANE_RUNG, "client.lane.rung", "the doorbell is rung, the rail may sleep") \
    X(CLIENT_RING_DESCRIBED, "client.ring.described", "the table of a direct slice is written, the slice is not published") \
    X(CLIENT_RING_PUBLISHED, "client.ring.published", "a direct slice is published, the rail may sleep") \
    X(CLIENT_TRANSFER_RESERVED, "client.transfer.reserved", "an entry of the table of transfers is filled, nobody was told") \
    X(CLIENT_TRANSFER_NOTED, "client.transfer.noted", "the daemon has the note of a transfer that is not published") \
    X(CLIENT_TRANSFER_PUBLISHED, "client.transfer.published", "the feeder has the transfer, the caller does not know") \
    X(CLIENT_TRANSFER_CANCELLED, "client.transfer.cancelled", "the word that cancels is written, the daemon was not told") \
    X(CLIENT_BOUNCE_COPYING, "client.bounce.copying", "some runs of a bounce frame are copied") \
    X(CLIENT_BOUNCE_COPIED, "client.bounce.copied", "a bounce frame is copied, `emptied` has not moved") \
    X(CLIENT_BOUNCE_EMPTIED, "client.bounce.emptied", "`emptied` has moved, the rail may sleep") \
    X(CLIENT_LOCAL_ASKED, "client.local.asked", "local route: admission is asked for") \
    X(CLIENT_LOCAL_COPYING, "client.local.copying", "local route: a piece is at the destination of another process") \
    X(CLIENT_LOCAL_COPIED, "client.local.copied", "local route: all is copied, the daemon was not told") \
    X(CLIENT_LOCAL_TOLD, "client.local.told", "local route: the end is published") \
    X(CLIENT_REQUEST_SENT, "client.request.sent", "a request is in the daemon's socket, of whatever kind") \
    X(CLIENT_ATTACH_MAPPED, "client.attach.mapped", "the segments are mapped, the threads run") \
    X(CLIENT_LANE_LEASED, "client.lane.leased", "a lane is leased and not mapped yet") \
    X(CLIENT_REGION_REGISTERED, "client.region.registered", "the daemon has the region, this process does not know its index") \
    X(CLIENT_REGION_REMOVED, "client.region.removed", "the region is taken from here, the daemon was not told") \
    X(CLIENT_REMOTE_OPENED, "client.remote.opened", "a peer's region is open, this process does not know its index") \
    X(CLIENT_REMOTE_UNMAPPED, "client.remote.unmapped", "local route: a region is unmapped, the daemon waits to hear it") \
    X(CLIENT_REATTACH_CONNECTED, "client.reattach.connected", "attached to the next daemon, no region is registered again") \
    X(DAEMON_START_SEGMENT, "daemon.start.segment", "the node segment is there and not published") \
    X(DAEMON_START_LISTENING, "daemon.start.listening", "clients and peers can connect, nobody was told") \
    X(DAEMON_ATTACH_SEGMENT, "daemon.attach.segment", "the client's segment is made, no rail knows it") \
    X(DAEMON_ATTACH_ON_RAILS, "daemon.attach.on_rails", "every rail looks at the segment, the client has no answer") \
    X(DAEMON_ATTACH_ANSWERED, "daemon.attach.answered", "the client has its answer") \
    X(DAEMON_LANE_RESERVED, "daemon.lane.reserved", "relay memory is made, no rail knows it") \
    X(DAEMON_LANE_LEASED, "daemon.lane.leased", "the rail has the lane, the client has no answer") \
    X(DAEMON_REGION_MAPPED, "daemon.region.mapped", "a region is mapped, nobody can open it") \
    X(DAEMON_REGION_OFFERED, "daemon.region.offered", "a region can be opened, the client has no answer") \
    X(DAEMON_REGION_WITHDRAWING, "daemon.region.withdrawing", "nobody can open the region any more, rails were not asked") \
    X(DAEMON_REGION_WITHDRAWN, "daemon.region.withdrawn", "no rail reads or writes the region, the client has no answer") \
    X(DAEMON_BOUNCE_MADE, "daemon.bounce.made", "bounce memory is made, no rail knows it") \
    X(DAEMON_REMOTE_OPENED, "daemon.remote.opened", "the peer has opened a region, no rail here knows it") \
    X(DAEMON_REMOTE_ADDED, "daemon.remote.added", "rails may write to a peer's region, the client has no answer") \
    X(DAEMON_LOCAL_GRANTED, "daemon.local.granted", "a client may map another's region, and has no answer") \
    X(DAEMON_DETACH_BEGUN, "daemon.detach.begun", "a client has left, its rails still serve it") \
    X(DAEMON_DETACH_DRAINED, "daemon.detach.drained", "rails have let go of a client, its regions are mapped") \
    X(DAEMON_DETACH_RELEASED, "daemon.detach.released", "a client's row is idle, its objects are not unlinked") \
    X(DAEMON_PEER_WELCOMED, "daemon.peer.welcomed", "a peer has answered Hello, nobody here uses it yet") \
    X(DAEMON_PEER_DROPPED, "daemon.peer.dropped", "clients were told that a peer is gone, rails still have its slices") \
    X(DAEMON_SESSION_MADE, "daemon.session.made", "a sender has a session, and no answer") \
    X(DAEMON_SESSION_ENDING, "daemon.session.ending", "a session ends, its connections are not fenced") \
    X(DAEMON_RAIL_INVITED, "daemon.rail.invited", "a sender may connect a rail, and has no answer") \
    X(DAEMON_RAIL_ADMITTED, "daemon.rail.admitted", "a rail connection has shown its token, no rail reads it") \
    X(DAEMON_RAIL_CONNECTED, "daemon.rail.connected", "sending side: the receiver reads the connection, no rail here writes it") \
    X(DAEMON_FENCE_ASKED, "daemon.fence.asked", "sending side: a connection is lost, the receiver was not asked") \
    X(DAEMON_FENCE_ANSWERED, "daemon.fence.answered", "sending side: what was placed is known, and not settled") \
    X(DAEMON_FENCE_CLOSED, "daemon.fence.closed", "receiving side: the socket is closed, what was placed is not recorded") \
    X(DAEMON_FENCE_RECORDED, "daemon.fence.recorded", "receiving side: what was placed is recorded, the sender has no answer") \
    X(DAEMON_SETTLE_BEGUN, "daemon.settle.begun", "the rail knows what was placed, no slice has ended") \
    X(DAEMON_NOTE_DUE, "daemon.note.due", "all slices are placed, the note is not sent") \
    X(DAEMON_NOTE_DELIVERED, "daemon.note.delivered", "receiving side: the engine has the note, the sender does not know") \
    X(DAEMON_NOTE_CONFIRMED, "daemon.note.confirmed", "sending side: the note is confirmed, the transfer has not ended") \
    X(DAEMON_ABORT_REFUSING, "daemon.abort.refusing", "rails refuse a tag, its senders were not asked") \
    X(DAEMON_ABORT_CANCELLED, "daemon.abort.cancelled", "sending side: an aborted transfer is stopped and not settled") \
    X(DAEMON_LANE_TAKEN, "daemon.lane.taken", "a slot is taken from the lane, nothing of it is checked") \
    X(DAEMON_RING_TAKEN, "daemon.ring.taken", "direct slices are taken, their places are not given back") \
    X(DAEMON_SLICE_OPENED, "daemon.slice.opened", "a slice counts in its transfer, and is queued nowhere") \
    X(DAEMON_FRAME_BEGUN, "daemon.frame.begun", "a frame has its place in the window, no byte is sent") \
    X(DAEMON_FRAME_SENT, "daemon.frame.sent", "a frame is in the socket") \
    X(DAEMON_FRAME_SETTLED, "daemon.frame.settled", "the receiver has confirmed a frame, its slot is not returned") \
    X(DAEMON_SLOT_RETURNED, "daemon.slot.returned", "a slot has its credit back, its slice still counts") \
    X(DAEMON_TRANSFER_COUNTED, "daemon.transfer.counted", "the last slice has ended, nothing is recorded") \
    X(DAEMON_TRANSFER_RECORDED, "daemon.transfer.recorded", "the result is written, `settled` and `done` are not") \
    X(DAEMON_TRANSFER_SETTLED, "daemon.transfer.settled", "`settled` is written, `done` is not") \
    X(DAEMON_TRANSFER_DONE, "daemon.transfer.done", "`done` is written, who waits sleeps") \
    X(DAEMON_FRAME_HEADER, "daemon.frame.header", "receiving side: a frame's header is checked, no byte is placed") \
    X(DAEMON_FRAME_PLACING, "daemon.frame.placing", "receiving side: some bytes of a frame are placed") \
    X(DAEMON_FRAME_PLACED, "daemon.frame.placed", "receiving side: a frame is placed and not acknowledged") \
    X(DAEMON_FRAME_ACKNOWLEDGED, "daemon.frame.acknowledged", "receiving side: an acknowledgement is in the socket") \
    X(DAEMON_BOUNCE_GRANTED, "daemon.bounce.granted", "a slot of bounce memory is reserved, the sender does not know") \
    X(DAEMON_BOUNCE_FILLED, "daemon.bounce.filled", "a bounce frame is described, `filled` has not moved") \
    X(DAEMON_BOUNCE_PUBLISHED, "daemon.bounce.published", "`filled` has moved, the client may sleep") \
    X(DAEMON_BOUNCE_RECLAIMED, "daemon.bounce.reclaimed", "the client has copied a frame, the sender does not know") \
    X(DAEMON_TAKEOVER_CARRIES, "daemon.takeover.carries", "verbs: another rail's connection has slices of this one, nobody was told") \
    X(DAEMON_TAKEOVER_RETURNING, "daemon.takeover.returning", "verbs: a rail's probe has passed, its slices go another way") \
    X(DAEMON_REFUSE_BEGUN, "daemon.refuse.begun", "a rail refuses what comes, what it was placing has not ended")

#define RR_FAULT_NUMBER(symbol, name, text) RR_FAULT_##symbol,
enum rr_fault { RR_FAULT_NONE = 0, RR_FAULT_POINTS(RR_FAULT_NUMBER) RR_FAULT_COUNT };

struct rr_fault_facts {
    const char *name, *text;
};

#define RR_FAULT_FACTS(symbol, name, text) {name, text},
__attribute__((unused)) static const struct rr_fault_facts rr_fault_table[] = {RR_FAULT_POINTS(RR_FAULT_FACTS)}; /* by number - 1 */

/* Weak: one of each in a shared object, whatever number of its files include this one. */
#define RR_FAULT_PRIVATE __attribute__((weak, visibility("hidden")))
RR_FAULT_PRIVATE uint32_t rr_fault_armed;    /* enum rr_fault */
RR_FAULT_PRIVATE uint32_t rr_fault_passages; /* how many are left until the last */

RR_FAULT_PRIVATE __attribute__((noinline, cold)) void rr_fault_pass(void)
{
    if (rr_fetch_add_u32(&rr_fault_passages, UINT32_MAX) != 1) return;
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static inline void rr_fault_point(enum rr_fault point)
{
    if (__builtin_expect(rr_load_relaxed_u32(&rr_fault_armed) == (uint32_t)point, 0)) rr_fault_pass();
}

static inline void rr_fault_arm(uint32_t point, uint32_t passages)
{
    rr_store_relaxed_u32(&rr_fault_passages, passages);
    rr_store_release_u32(&rr_fault_armed, point);
}

#endif
