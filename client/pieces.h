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
