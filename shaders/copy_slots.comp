// copy_slots: slots of one cache to the start of another: destination[head, s] = source[head, from + s].
//
// source       uint [heads, source_capacity, words]
// destination  uint [heads, destination_capacity, words]    not the same memory
//
// push: heads, words, source_capacity, destination_capacity, from, count (slots); the _at of every binding.
// Groups: (any); they share the work. Reference: destination[:, :count] = source[:, from : from + count].
#version 450

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint source_at;
    uint destination_at;
    uint heads;
    uint words;
    uint source_capacity;
    uint destination_capacity;
    uint from;
    uint count;
};

layout(std430, binding = 0) readonly buffer Source { uint source[]; };
layout(std430, binding = 1) writeonly buffer Destination { uint destination[]; };

void main() {
    const uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < heads * count * words; i += step) {
        const uint inside = i % (count * words), head = i / (count * words);
        destination[destination_at + head * destination_capacity * words + inside] =
            source[source_at + (head * source_capacity + from) * words + inside];
    }
}
