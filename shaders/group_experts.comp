// group_experts: which rows each expert has: the pairs (row, choice) in the order of their experts, where each lies in
// that order, and tiles of at most TILE_ROWS of them, each of one expert.
//
// ids     int [pairs]            router's ids, flattened: expert of pair row * top_k + choice
// pairs   uint [pairs]           pairs by rising expert; the order inside an expert is any
// places  uint [pairs]           where each pair lies in `pairs`
// work    uint [1 + 3 * most]    the number of tiles, then expert, first place and number of places of each
//
// push: pair_count; the _at of every binding. Groups: (1): one workgroup does it all. EXPERTS, TILE_ROWS:
// specialisation constants; `most` is at least pairs / TILE_ROWS + EXPERTS and need not exceed pairs.
// Reference: argsort of ids, counted.
#version 450
#extension GL_KHR_memory_scope_semantics : require

layout(local_size_x = 128, local_size_x_id = 0) in;  // WORKGROUP_X
layout(constant_id = 1) const uint EXPERTS = 128;
layout(constant_id = 2) const uint TILE_ROWS = 8;

layout(push_constant) uniform Push {
    uint ids_at;
    uint pairs_at;
    uint places_at;
    uint work_at;
    uint pair_count;
};

layout(std430, binding = 0) readonly buffer Ids { int ids[]; };
layout(std430, binding = 1) writeonly buffer Pairs { uint pairs[]; };
layout(std430, binding = 2) writeonly buffer Places { uint places[]; };
layout(std430, binding = 3) writeonly buffer Work { uint work[]; };

shared uint counts[EXPERTS];
shared uint cursors[EXPERTS];

void main() {
    const uint me = gl_LocalInvocationID.x, all = gl_WorkGroupSize.x;
    for (uint e = me; e < EXPERTS; e += all) {
        counts[e] = 0;
    }
    barrier();
    // relaxed atomics: their scope is said, for not every device has the wider one that is meant otherwise
    for (uint p = me; p < pair_count; p += all) {
        atomicAdd(counts[ids[ids_at + p]], 1, gl_ScopeWorkgroup, 0, 0);
    }
    barrier();
    for (uint e = me; e < EXPERTS; e += all) {
        uint place = 0, tile = 0;
        for (uint before = 0; before < e; before++) {
            place += counts[before];
            tile += (counts[before] + TILE_ROWS - 1) / TILE_ROWS;
        }
        cursors[e] = place;
        const uint count = counts[e];
        for (uint done = 0; done < count; done += TILE_ROWS) {
            const uint at = work_at + 1 + 3 * tile++;
            work[at] = e;
            work[at + 1] = place + done;
            work[at + 2] = min(count - done, TILE_ROWS);
        }
        if (e == EXPERTS - 1) {
            work[work_at] = tile;
        }
    }
    barrier();
    for (uint p = me; p < pair_count; p += all) {
        const uint place = atomicAdd(cursors[ids[ids_at + p]], 1, gl_ScopeWorkgroup, 0, 0);
        pairs[pairs_at + place] = p;
        places[places_at + p] = place;
    }
}
