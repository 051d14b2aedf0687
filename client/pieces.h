/* Walking the contiguous pieces of a part: a list of blocks, or rows of pages. */
#ifndef RAILRELAY_PIECES_H
#define RAILRELAY_PIECES_H

#include "client_core.h"

struct rc_piece {
    uint64_t source, destination, length;
    uint32_t region, remote;
};

/* The next piece, or what is left of it; 0 at the end. */
static inline int rc_peek_piece(const struct rc_part *part, struct rc_piece *out)
{
    if (part->blocks) {
        if (part->block_at == part->block_count) return 0;
        const struct rc_block *block = &part->blocks[part->block_at];
        *out = (struct rc_piece){block->source + part->block_offset, block->destination + part->block_offset, block->length - part->block_offset,
                                 block->region, block->remote};
        return 1;
    }
    const struct rc_pages *pages = &part->submission->pages;
    if (part->row_at == part->row_count || part->page_at == pages->page_count) return 0;
    const struct rc_row *row = &pages->rows[part->row_indices[part->row_at]];
    *out = (struct rc_piece){row->source + (uint64_t)pages->source_pages[part->page_at] * pages->source_stride + part->block_offset,
                             row->destination + (uint64_t)pages->destination_pages[part->page_at] * pages->destination_stride + part->block_offset,
                             pages->piece_bytes - part->block_offset, row->region, row->remote};
    return 1;
}

/* Equal pieces at constant distances, the first of them at `first`. */
struct rc_run {
    struct rc_piece first;
    uint64_t source_step, destination_step;
    uint32_t count;
};

/* How the part goes on, if with the start of whole pieces of pages: 0 otherwise, and at the end. Costs the same however
 * many pieces there are. */
static inline int rc_peek_run(const struct rc_part *part, struct rc_run *out)
{
    const struct rc_pages *pages = &part->submission->pages;
    if (!pages->page_ends || part->block_offset || !rc_peek_piece(part, &out->first)) return 0;
    uint32_t row = part->row_at, page = part->page_at;
    out->source_step = out->destination_step = 0;
    if (part->by_page) {
        out->count = part->row_ends[row] - row;
        if (out->count == 1) return 1;
        const struct rc_row *from = &pages->rows[part->row_indices[row]], *to = &pages->rows[part->row_indices[row + 1]];
        out->source_step = to->source - from->source;
        out->destination_step = to->destination - from->destination;
    } else {
        out->count = pages->page_ends[page] - page;
        if (out->count == 1) return 1;
        out->source_step = (uint64_t)(pages->source_pages[page + 1] - pages->source_pages[page]) * pages->source_stride;
        out->destination_step = (uint64_t)(pages->destination_pages[page + 1] - pages->destination_pages[page]) * pages->destination_stride;
    }
    return 1;
}

/* The first `taken` pieces of the run are dealt with. */
static inline void rc_take_run(struct rc_part *part, uint32_t taken)
{
    const struct rc_pages *pages = &part->submission->pages;
    part->bytes_left -= taken * pages->piece_bytes;
    if (part->by_page) {
        part->row_at += taken;
        if (part->row_at < part->row_count) return;
        part->row_at = 0;
        part->page_at++;
    } else {
        part->page_at += taken;
        if (part->page_at < pages->page_count) return;
        part->page_at = 0;
        part->row_at++;
    }
}

/* Of the piece of this length, `taken` bytes are dealt with. */
static inline void rc_take_piece(struct rc_part *part, uint64_t taken, uint64_t length)
{
    part->bytes_left -= taken;
    if (taken < length) {
        part->block_offset += taken;
        return;
    }
    part->block_offset = 0;
    if (part->blocks) {
        part->block_at++;
    } else if (part->by_page) {
        if (++part->row_at < part->row_count) return;
        part->row_at = 0;
        part->page_at++;
    } else if (++part->page_at == part->submission->pages.page_count) {
        part->page_at = 0;
        part->row_at++;
    }
}

#endif
